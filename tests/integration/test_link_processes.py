"""Links between two real processes, over Gloo, over a local socket and over a device's wire with CPU memory: echo,
damage, silence, death, and a new epoch after each. tests/gpu/test_nccl.py runs parts of it over NCCL."""

import contextlib
import os
import queue
import signal
import threading
import time

import numpy as np
import pytest
import torch

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import (
    FrameError,
    LinkError,
    TransportClosed,
    TransportError,
    TransportTimeout,
    join_link,
)
from outrider.cluster.link.codec import pack
from outrider.cluster.link.frame import HEADER_WORDS, FrameKind, decode, encode
from outrider.cluster.link.messages import Close, CloseReason, Commit, DraftSampling, Open, Proposals
from outrider.cluster.modes import Mode
from tests import cpu_device
from tests.integration.echo_peer import CAPACITY, DEADLINE_S, HANG_S, SECRET, K, Peer, invite
from tests.stalls import Stalls
from tests.threads import threads_end

BACKENDS = ("gloo", "local", cpu_device.BACKEND)


@pytest.fixture(scope="module", params=BACKENDS)
def lasting_peer(request):
    """Survives its links: for tests that do not harm the process."""
    peer = Peer(request.param)
    yield peer
    peer.end()


@pytest.fixture
def peer(lasting_peer):
    yield lasting_peer
    if lasting_peer.links[-1].broken is None:
        lasting_peer.links[-1].close("end of test")
        lasting_peer.report()


@pytest.fixture(params=BACKENDS)
def mortal_peer(request):
    peer = Peer(request.param)
    yield peer
    peer.end()


@pytest.fixture(params=BACKENDS)
def ends(request):
    """Two transports that are connected, and a deadline that never comes."""
    invitation, complete = invite(1, "test", link_deadline_ms=1e6, backend=request.param, capacity_words=LONG)
    joined = queue.SimpleQueue()
    threading.Thread(target=lambda: joined.put(join_link(invitation, SECRET, HANG_S))).start()
    here = complete(HANG_S)
    there = joined.get(timeout=HANG_S)
    assert here.backend == there.backend == request.param
    yield here, there
    here.abort()
    there.abort()


pytestmark = pytest.mark.timeout(300)

LONG = 1 << 20
"""Words of a frame that no socket takes at once: 4 MiB."""

ROUND = [
    Open(1, 3, 0, [1, 2, 3], K, DraftSampling(Mode.COUPLED, 0.7, seed=42)),
    Commit(1, 3, [4], 4, 2),
    Proposals(1, 4, [5, 6, 7, 8]),
    Close(1, CloseReason.FINISHED),
]


def echo(link, messages):
    link.post(pack(messages, CAPACITY), work_us=10)
    received = link.poll(HANG_S)
    assert received is not None, link.broken
    assert received.messages == messages
    assert received.work_us == 11


def until_broken(link):
    deadline = time.monotonic() + HANG_S
    while link.broken is None:
        assert time.monotonic() < deadline, "the link never broke"
        time.sleep(0.01)
    return link.broken


def test_echo_and_ping(peer, capsys):
    link = peer.link()
    for _ in range(200):
        echo(link, ROUND)
    stats = link.ping(64, HANG_S)
    with capsys.disabled():
        print(f" [{peer.backend}, round trip through two links, µs: {stats}]", end="")
    assert 0 < stats.min_us <= stats.median_us <= stats.max_us
    assert link.broken is None


def test_idle_link_lives_on_heartbeats(peer):
    link = peer.link(deadline_s=2 * DEADLINE_S)
    time.sleep(2.5 * DEADLINE_S)
    echo(link, ROUND)


def test_close_reaches_the_peer_with_its_reason(peer):
    link = peer.link()
    echo(link, ROUND)
    link.close("verifier leaves")
    assert peer.report() == {"broken": "closed by peer: verifier leaves", "echoed": 1}


def test_closed_by_the_peer(peer):
    reasons = queue.SimpleQueue()
    link = peer.link(close_after=1, on_broken=reasons.put)
    echo(link, ROUND)
    assert reasons.get(timeout=HANG_S) == "closed by peer: had enough"
    assert peer.report()["broken"] == "closed on this side: had enough"


@pytest.mark.parametrize(
    ("flip_word", "reason"),
    [
        pytest.param(0, "bad frame: magic", id="header-magic"),
        pytest.param(3, "bad frame: checksum", id="header-sequence"),
        pytest.param(HEADER_WORDS + 5, "bad frame: checksum", id="payload"),
    ],
)
def test_damaged_frame_is_never_delivered_and_a_new_epoch_works(peer, flip_word, reason):
    link = peer.link(flip_word=flip_word)
    link.post(pack(ROUND, CAPACITY))
    assert until_broken(link).startswith(reason)
    assert link.poll(0) is None
    assert peer.report()["broken"].startswith("connection lost")
    echo(peer.link(), ROUND)


def test_frame_of_another_epoch_is_never_delivered(peer):
    link = peer.link(epoch_offset=1)
    link.post(pack(ROUND, CAPACITY))
    # Whichever side hears the other first ends the link; the other then loses the connection.
    reasons = [until_broken(link), peer.report()["broken"]]
    expected = f"found {link.epoch}, expected {link.epoch + 1}", f"found {link.epoch + 1}, expected {link.epoch}"
    assert any(f"epoch: {text}" in reason for reason in reasons for text in expected)
    assert link.poll(0) is None


def test_stopped_peer(mortal_peer):
    """Silence breaks the link at its deadline. Until then, and after, no call on this thread waits for the peer."""
    link = mortal_peer.link(deadline_s=DEADLINE_S)
    echo(link, ROUND)
    os.kill(mortal_peer.process.pid, signal.SIGSTOP)
    calls, start = [], time.monotonic()
    with Stalls() as stalls:
        while link.broken is None and time.monotonic() - start < HANG_S:
            before = time.monotonic()
            with contextlib.suppress(LinkError):
                link.post(pack(ROUND, CAPACITY))
            link.poll(0)
            calls.append((before, time.monotonic()))
            time.sleep(0.005)
    longest_s = max(after - before - stalls.within_s(before, after) for before, after in calls)
    assert link.broken == f"link deadline of {DEADLINE_S:g} s passed: the peer sent nothing, or did not read"
    assert longest_s < DEADLINE_S / 2, "a call waited for the stopped peer"
    link.abort("done")
    os.kill(mortal_peer.process.pid, signal.SIGCONT)
    assert mortal_peer.report()["broken"] is not None
    echo(mortal_peer.link(), ROUND)


def test_killed_peer(mortal_peer):
    """Noticed by the connection: no deadline is near."""
    reasons = queue.SimpleQueue()
    link = mortal_peer.link(on_broken=reasons.put)
    echo(link, ROUND)
    os.kill(mortal_peer.process.pid, signal.SIGKILL)
    assert reasons.get(timeout=HANG_S).startswith("connection lost: ")
    assert link.poll(HANG_S) is None


def kill_the_peer_of_a_link(new_peer):
    """Kill a peer on a wire that may not notice, and use the wire with another peer. Returns why the link broke."""
    peer, reasons = new_peer(), queue.SimpleQueue()
    with threads_end(HANG_S):
        link = peer.link(deadline_s=DEADLINE_S, on_broken=reasons.put)
        echo(link, ROUND)
        os.kill(peer.process.pid, signal.SIGKILL)
        reason = reasons.get(timeout=HANG_S)
        assert link.poll(HANG_S) is None
        link.abort("done")
        assert link.join(HANG_S), "a thread or the wire is left"
    assert torch.ones(CAPACITY, device=DEVICE_BACKENDS[peer.backend]).sum() == CAPACITY
    echo(new_peer().link(), ROUND)
    return reason


def abort_a_link(new_peer):
    """Abort a link on a wire whose other end may not notice, and use another with the same peer. Returns why the first
    broke at the peer."""
    peer = new_peer()
    with threads_end(HANG_S):
        link = peer.link(deadline_s=DEADLINE_S)
        echo(link, ROUND)
        link.abort("enough")
        assert link.join(HANG_S), "a thread or the wire is left"
    reason = peer.report()["broken"]
    echo(peer.link(), ROUND)
    return reason


@pytest.fixture
def new_deaf_peer():
    with contextlib.ExitStack() as ends:

        def make():
            peer = Peer(cpu_device.DEAF)
            ends.callback(peer.end)
            return peer

        yield make


@pytest.mark.parametrize("ending", [kill_the_peer_of_a_link, abort_a_link])
def test_an_end_that_the_wire_does_not_notice_is_noticed_by_the_deadline(ending, new_deaf_peer):
    """NCCL within a machine is such a wire."""
    reason = ending(new_deaf_peer)
    assert reason == f"link deadline of {DEADLINE_S:g} s passed: the peer sent nothing, or did not read"


def test_ended_links_leave_nothing(peer):
    def left():
        return np.array(
            [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()]
        )

    echo(peer.link(), ROUND)
    peer.links.pop().close("warm")
    peer.report()
    before = left()
    for ending in ("close", "abort", "close", "abort"):
        link = peer.link()
        echo(link, ROUND)
        getattr(peer.links.pop(), ending)("over")
        del link
        peer.report()
    deadline = time.monotonic() + HANG_S
    while (left() > before).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (left() <= before).all(), f"descriptors, threads, Python threads: {before} before, {left()} after"
    peer.link()


def test_abort_wakes_sender_and_receiver_here_and_there(ends):
    """Long before any deadline. The peer receives nothing and sends nothing: both our threads wait on the wire."""
    here, there = ends
    outcomes = queue.SimpleQueue()

    def waits(name, operation, *arguments):
        try:
            operation(np.zeros(LONG, np.int32), *arguments)
        except TransportClosed as error:
            outcomes.put((name, str(error)))

    for job in (("recv", there.recv, 1000), ("send", lambda buffer: there.start_send(buffer)())):
        threading.Thread(target=waits, args=job, daemon=True).start()
    time.sleep(0.2)
    assert outcomes.empty()
    there.abort()
    there.abort()
    ended = dict(outcomes.get(timeout=HANG_S) for _ in range(2))
    assert ended == {"recv": "aborted on this side", "send": "aborted on this side"}
    waits("again", there.start_send)
    assert outcomes.get_nowait() == ("again", "aborted on this side")
    with pytest.raises(TransportClosed):
        here.recv(np.zeros(LONG, np.int32), 1000)


def sends(transport, buffer):
    """On a thread, which is returned: it ends when all of the frame is on the wire."""

    def send():
        if (finish := transport.start_send(buffer)) is not None:
            finish()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_frames_of_all_lengths_pass_in_order(ends):
    """Longer than what a socket holds, too, both ways at once; behind a short one stands what stood there before."""
    lengths = [1, 3000, 0, 7, LONG - HEADER_WORDS, 1, 1000, 0]
    rng = np.random.default_rng(0)
    payloads = [rng.integers(0, 1000, size=length, dtype=np.int32) for length in lengths]
    received = np.zeros(LONG, np.int32)
    for sequence, payload in enumerate(payloads):
        before = received.copy()
        for sender, receiver in (ends, ends[::-1]):
            buffer = np.zeros(LONG, np.int32)
            used = encode(buffer, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=payload)
            sending = sends(sender, buffer[:used])
            receiver.recv(received, HANG_S)
            sending.join(HANG_S)
            assert not sending.is_alive()
            assert np.array_equal(decode(received, 1, sequence).payload, payload)
            assert np.array_equal(received[used:], before[used:])


def test_a_burst_of_frames_arrives_one_by_one(ends):
    here, there = ends
    buffers = []
    for sequence in range(50):
        buffer = np.zeros(200, np.int32)
        payload = np.full(sequence, sequence, np.int32)
        buffers.append(buffer[: encode(buffer, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=payload)])

    def burst():
        for buffer in buffers:
            if (finish := here.start_send(buffer)) is not None:
                finish()

    thread = threading.Thread(target=burst)
    thread.start()
    received = np.zeros(LONG, np.int32)
    for sequence in range(50):
        there.recv(received, HANG_S)
        assert decode(received, 1, sequence).payload.tolist() == [sequence] * sequence
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_the_end_of_a_longer_frame_before_is_never_believed(ends):
    """Its words still stand there: a frame that says it is longer than what came is damaged, and called so."""
    here, there = ends
    received = np.zeros(LONG, np.int32)
    buffer = np.zeros(LONG, np.int32)
    for sequence, value in enumerate((5, 6)):
        used = encode(buffer, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=np.full(100, value, np.int32))
        sending = sends(here, buffer[: used - 60 * sequence])
        there.recv(received, HANG_S)
        sending.join(HANG_S)
        if sequence == 0:
            assert decode(received, 1, 0).payload.tolist() == [5] * 100
    assert received[used - 1] == 5
    with pytest.raises(FrameError, match=r"^checksum:"):
        decode(received, 1, 1)


def test_silence_ends_a_wire_for_good(ends):
    here, _ = ends
    with pytest.raises(TransportTimeout, match="the peer sent nothing, or did not read"):
        here.recv(np.zeros(LONG, np.int32), 0.05)
    with pytest.raises(TransportError):
        here.recv(np.zeros(LONG, np.int32), HANG_S)
