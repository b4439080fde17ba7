"""Links between two real processes, over ipc, over tcp and over a device's wire with CPU memory: echo, damage, silence,
death, and a new epoch after each. tests/gpu/test_nccl.py runs parts of it over NCCL."""

import contextlib
import os
import queue
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.link import LinkError, WireError
from outrider.cluster.link.messages import Close, CloseReason, Commit, DraftSampling, Open, Proposals, pack
from outrider.cluster.modes import Mode
from tests.integration.echo_peer import DEADLINE_S, HANG_S, K, Peer, connected
from tests.support.devices import cpu_device
from tests.support.load.stalls import Stalls
from tests.support.threads import threads_end

BACKENDS = ("ipc", "tcp", cpu_device.BACKEND)


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
    """Yield two wires that are connected, and a deadline that never comes."""
    here, there = connected(request.param)
    yield here, there
    here.end()
    there.end()


@pytest.fixture(params=("ipc", "tcp"))
def host_ends(request):
    here, there = connected(request.param)
    yield here, there
    here.end()
    there.end()


pytestmark = pytest.mark.timeout(300)

LONG = 4 << 20
"""Bytes of a frame that no socket takes at once."""

ROUND = [
    Open(1, [1, 2, 3], K, DraftSampling(Mode.COUPLED, 0.7, seed=42)),
    Commit(1, 3, [4], 4, 2),
    Proposals(1, 4, [5, 6, 7, 8]),
    Close(1, CloseReason.FINISHED),
]


def echo(link, messages):
    link.post(pack(messages), work_us=10)
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
    median_us = link.ping(64, HANG_S)
    with capsys.disabled():
        print(f" [{peer.backend}, round trip through two links: {median_us:.0f} µs]", end="")
    assert median_us > 0
    assert link.broken is None


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
                link.post(pack(ROUND))
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
    assert torch.ones(64, device=DEVICE_BACKENDS[peer.backend]).sum() == 64
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
    warm = peer.links.pop()
    warm.close("warm")
    assert warm.join(HANG_S)
    del warm
    peer.report()
    before = left()
    for ending in ("close", "abort", "close", "abort"):
        link = peer.link()
        echo(link, ROUND)
        getattr(peer.links.pop(), ending)("over")
        assert link.join(HANG_S)
        del link
        peer.report()
    deadline = time.monotonic() + HANG_S
    while (left() > before).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (left() <= before).all(), f"descriptors, threads, Python threads: {before} before, {left()} after"
    echo(peer.link(), ROUND)  # what ends it needs a link that both sides have


def test_end_wakes_a_receiver_here_and_is_noticed_there(ends):
    """Long before any deadline, and however often `end` is called."""
    here, there = ends
    outcomes = queue.SimpleQueue()

    def waits(wire):
        try:
            wire.recv(1000)
        except WireError as error:
            outcomes.put(str(error))

    threads = [threading.Thread(target=waits, args=(wire,), daemon=True) for wire in ends]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert outcomes.empty()
    there.end()
    there.end()
    ended = [outcomes.get(timeout=HANG_S) for _ in ends]
    assert "ended on this side" in ended
    for call in (lambda: there.send(b"x"), lambda: there.recv(0)):
        with pytest.raises(WireError, match="ended on this side"):
            call()
    here.end()


def test_a_wire_may_end_while_other_threads_send_and_receive(ends):
    """ZeroMQ's sockets crash a process that closes them under another thread's hands."""
    started = threading.Barrier(7)

    def until_it_ends(operation):
        started.wait(HANG_S)
        with contextlib.suppress(WireError):
            while True:
                operation()

    jobs = [partial(wire.send, b"x" * 5000) for wire in ends for _ in range(2)] + [
        partial(wire.recv, 1) for wire in ends
    ]
    threads = [threading.Thread(target=until_it_ends, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    started.wait(HANG_S)
    for wire in ends:
        wire.end()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, 40_000, LONG])
def test_frames_of_all_lengths_pass_whole_and_in_order(ends, size):
    """Longer than what a socket or a device's tensor holds, too, both ways at once."""
    frames = [bytes([index]) * (size + index) for index in range(3)]
    for wire in ends:
        for frame in frames:
            wire.send(frame)
    for wire in ends:
        for frame in frames:
            assert wire.recv(HANG_S) == frame
        assert wire.recv(0.0) is None


def test_what_was_sent_before_the_end_arrives(host_ends):
    here, there = host_ends
    for index in range(50):
        there.send(bytes([index]))
    there.end(linger_s=HANG_S)
    assert [here.recv(HANG_S) for _ in range(50)] == [bytes([index]) for index in range(50)]
    with pytest.raises(WireError):
        here.recv(HANG_S)


def test_a_peer_that_does_not_read_delays_nobody_who_sends(host_ends):
    """Once very much is unsent, it is refused."""
    here, _ = host_ends

    def sends_on():
        for _ in range(100_000):
            here.send(b"x" * 10_000)

    with pytest.raises(WireError, match="does not read"):
        sends_on()
