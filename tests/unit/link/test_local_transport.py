"""The local socket: who gets in, and what passes. Sockets are real."""

import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from outrider.cluster.link import FrameError, TransportClosed, TransportError
from outrider.cluster.link.local_transport import LocalTransport, accept, dial, listen, machine, new_name
from tests.unit.link.memory_transport import CAPACITY, SOON_S, frame

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(not machine(), reason="needs Linux")]

ROOT = Path(__file__).parents[3]
VERIFIERS, DRAFTERS = b"v" * 32, b"d" * 32
"""What each says."""


def in_time():
    return time.monotonic() + SOON_S


@pytest.fixture
def listener():
    """Its name, and the socket."""
    name = new_name()
    with listen(name) as listening:
        yield name, listening


@pytest.fixture
def accepting(listener):
    """The name, and what becomes of the verifier's end."""
    outcome = queue.SimpleQueue()

    def run():
        try:
            outcome.put(accept(listener[1], VERIFIERS, DRAFTERS, in_time()))
        except TransportError as error:
            outcome.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield listener[0], outcome
    thread.join()


def stranger(name):
    reaching = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    reaching.settimeout(SOON_S)
    reaching.connect(f"\0{name}")
    return reaching


@contextlib.contextmanager
def connected(accepting):
    name, outcome = accepting
    dialled = dial(name, DRAFTERS, VERIFIERS, in_time())()
    with outcome.get(timeout=SOON_S) as accepted, dialled:
        yield accepted, dialled


def test_both_ends_know_each_other(accepting):
    with connected(accepting) as (accepted, dialled):
        accepted.sendall(b"hello")
        assert dialled.recv(5) == b"hello"


@pytest.mark.parametrize("says", [b"x" * 32, b"d", b"", VERIFIERS], ids=["wrong", "little", "nothing", "the other's"])
def test_whoever_does_not_know_the_word_is_hung_up_on_and_the_peer_gets_in(accepting, says):
    with stranger(accepting[0]) as reaching:
        reaching.sendall(says)
        if len(says) < 32:
            reaching.shutdown(socket.SHUT_WR)
        assert reaching.recv(100) == b"", "nothing is said to a stranger"
        with connected(accepting):
            pass


def test_a_silent_stranger_holds_nobody_up_for_long(accepting):
    with stranger(accepting[0]), connected(accepting):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
@pytest.mark.parametrize("listens", [False, True])
def test_another_user_s_process_is_no_peer(listens, accepting):
    """Whatever it knows, and whichever side it plays."""
    name, outcome = accepting
    theirs = new_name() if listens else name
    script = f"""
import os, socket
os.setuid(65534)
own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
if {listens}:
    own.bind("\\0{theirs}")
    own.listen()
    print("listening", flush=True)
    own, _ = own.accept()
    print(len(own.recv(100)))
else:
    own.connect("\\0{theirs}")
    try:
        own.sendall({DRAFTERS!r})
        print(len(own.recv(100)))
    except ConnectionError:
        print(0)
"""
    other = subprocess.Popen([sys.executable, "-IS", "-c", script], stdout=subprocess.PIPE, text=True)
    if listens:
        assert other.stdout.readline() == "listening\n"
        with pytest.raises(TransportError, match="another user's"):
            dial(theirs, DRAFTERS, VERIFIERS, in_time())
    assert other.communicate(timeout=SOON_S)[0] == "0\n", "it was told something"
    assert outcome.empty()
    with connected(accepting):
        pass


FROM_ANOTHER_NETWORK = """
import ctypes, sys, time
import tests  # which makes a bare checkout importable
import outrider.cluster.link.local_transport as local
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
    sys.exit(77)
print(local.machine())
try:
    local.dial(sys.argv[1], b"d" * 32, b"v" * 32, time.monotonic() + 5)
except local.TransportError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_a_container_with_a_network_of_its_own_is_on_this_machine_and_does_not_reach_the_socket(accepting):
    arguments = [sys.executable, "-c", FROM_ANOTHER_NETWORK, accepting[0]]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("may not make one here")
    said = "its local socket cannot be reached from here, as from another container: Connection refused"
    assert done.stdout.splitlines() == [machine(), said], done.stderr
    with connected(accepting):
        pass


def test_nobody_listens():
    with pytest.raises(TransportError, match="cannot be reached from here, as from another container"):
        dial(new_name(), DRAFTERS, VERIFIERS, in_time())


def test_somebody_else_listens(listener):
    name, listening = listener
    finish = dial(name, DRAFTERS, VERIFIERS, in_time())
    other, _ = listening.accept()
    with other:
        other.sendall(DRAFTERS)
        with pytest.raises(TransportError, match="somebody else is at the peer's local socket"):
            finish()


def test_the_peer_never_comes(listener):
    with pytest.raises(TransportError, match="has not come to the local socket in time"):
        accept(listener[1], VERIFIERS, DRAFTERS, time.monotonic() + 0.05)


def test_a_name_is_gone_with_its_listener_and_is_in_no_file_system(listener):
    name, listening = listener
    assert f"@{name}\n" in Path("/proc/net/unix").read_text()
    listening.close()
    assert name not in Path("/proc/net/unix").read_text()
    assert len({new_name() for _ in range(100)}) == 100


@pytest.fixture
def wire():
    """A transport, and the bare socket at its other end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    transport = LocalTransport(near, CAPACITY, send_timeout_s=SOON_S)
    with far:
        yield transport, far
        transport.abort()
    assert near.fileno() == -1


def bytes_of(sequence, words=20):
    return struct.pack("<I", 4 * words) + frame(sequence)[:words].tobytes()


def test_frames_in_pieces_and_in_crowds(wire):
    """Cut anywhere, in a length too."""
    transport, far = wire
    stream = b"".join(bytes_of(sequence, 16 + sequence % 40) for sequence in range(40))

    def trickle():
        at = 0
        for size in (1, 3, 70, 2, 500, 64, 68, 1000, len(stream)):
            far.sendall(stream[at : at + size])
            at += size
            time.sleep(0.01)

    thread = threading.Thread(target=trickle)
    thread.start()
    buffer = np.zeros(CAPACITY, np.int32)
    for sequence in range(40):
        transport.recv(buffer, SOON_S)
        assert np.array_equal(buffer[:16], frame(sequence)[:16])
    thread.join()


def test_a_frame_longer_than_agreed_is_refused_before_it_is_read(wire):
    transport, far = wire
    far.sendall(struct.pack("<I", 4 * CAPACITY + 4))
    with pytest.raises(FrameError, match=f"length: a frame of {4 * CAPACITY + 4} bytes"):
        transport.recv(np.zeros(CAPACITY, np.int32), SOON_S)


@pytest.mark.parametrize("cut", [2, 4, 30])
def test_half_a_frame_and_then_the_end_is_no_frame(wire, cut):
    transport, far = wire
    far.sendall(bytes_of(0)[:cut])
    far.close()
    buffer = np.full(CAPACITY, 7, np.int32)
    for _ in range(2):
        with pytest.raises(TransportClosed, match="the peer is gone"):
            transport.recv(buffer, SOON_S)
    assert (buffer == 7).all()


def test_what_had_come_before_the_end_is_handed_out(wire):
    transport, far = wire
    far.sendall(bytes_of(0) + bytes_of(1))
    far.close()
    buffer = np.zeros(CAPACITY, np.int32)
    for sequence in range(2):
        transport.recv(buffer, SOON_S)
        assert buffer[3] == sequence
    with pytest.raises(TransportClosed):
        transport.recv(buffer, SOON_S)


def test_a_wire_that_is_full_blocks_only_who_finishes(wire):
    transport, far = wire
    buffer, finish, sent = frame(0), None, 0
    while finish is None:
        finish = transport.start_send(buffer)
        sent += 4 + buffer.nbytes
    thread = threading.Thread(target=finish)
    thread.start()
    found = b""
    while len(found) < sent:
        found += far.recv(1 << 16)
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert found == (struct.pack("<I", buffer.nbytes) + buffer.tobytes()) * (sent // (4 + buffer.nbytes))


def test_the_first_failure_is_what_both_directions_tell(wire):
    """Whichever thread speaks first, the link's reason is the deadline, and not that this side gave up."""
    transport, _ = wire
    transport._send_timeout_s = 0.05
    finish = None
    while finish is None:
        finish = transport.start_send(frame(0))
    outcome = queue.SimpleQueue()

    def receive():
        try:
            transport.recv(np.zeros(CAPACITY, np.int32), 100)
        except TransportError as error:
            outcome.put(error)

    thread = threading.Thread(target=receive)
    thread.start()
    with pytest.raises(TransportError) as failure:
        finish()
    received = outcome.get(timeout=SOON_S)
    thread.join()
    assert str(failure.value) == str(received) == "the peer sent nothing, or did not read"
    assert type(failure.value) is type(received)
