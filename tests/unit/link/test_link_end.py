"""How a link ends: closed, aborted, or broken by what it finds on the wire."""

import queue
import threading
import time
from functools import partial

import numpy as np
import pytest

from outrider.cluster.link import LinkBroken
from outrider.cluster.link.frame import HEADER_WORDS, FrameKind
from tests.unit.link.memory_transport import CAPACITY, SOON_S, MemoryTransport, frame, until_broken, words

pytestmark = pytest.mark.timeout(300)


def test_silence_breaks_the_link(make_link):
    transport, _ = MemoryTransport.pair()
    reasons = queue.SimpleQueue()
    link = make_link(transport, deadline_s=0.05, on_broken=reasons.put)
    assert reasons.get(timeout=SOON_S) == link.broken
    assert link.broken == "link deadline of 0.05 s passed: recv timed out"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (lambda: frame(1), "sequence: found 1, expected 0"),
        (lambda: frame(0, epoch=2), "epoch: found 2, expected 1"),
        (lambda: np.zeros(CAPACITY, np.int32), "magic"),
        (lambda: frame(0, FrameKind.PONG), "length: a PONG"),
        (lambda: frame(0, payload=[5]) ^ np.int32(2) * (np.arange(CAPACITY) == HEADER_WORDS).astype(np.int32), "check"),
    ],
)
def test_bad_frame_breaks_the_link_and_delivers_nothing(make_link, sent, reason):
    near, far = MemoryTransport.pair()
    link = make_link(near)
    far.send(sent())
    assert reason in until_broken(link)
    assert link.broken.startswith("bad frame: ")
    assert link.poll(0) is None


def test_the_end_of_a_longer_frame_before_is_never_believed(make_link):
    """A frame that says it is longer than what came finds the former one's words there."""
    near, far = MemoryTransport.pair()
    link = make_link(near)
    far.send(frame(0, payload=[5] * 40))
    assert link.poll(SOON_S).messages == [5] * 40
    far.send(frame(1, payload=[6] * 40)[: HEADER_WORDS + 10])
    assert until_broken(link).startswith("bad frame: checksum")
    assert link.poll(0) is None


def test_repeated_frame_breaks_the_link(make_link):
    near, far = MemoryTransport.pair()
    link = make_link(near)
    far.send(frame(0, payload=[1]))
    far.send(frame(0, payload=[1]))
    assert "sequence: found 0, expected 1" in until_broken(link)
    assert link.poll(0).messages == [1]
    assert link.poll(0) is None


def test_undecodable_message_breaks_the_link(make_link):
    def refuse(payload):
        raise ValueError("Commit.token_ids: no")

    near, far = MemoryTransport.pair()
    link = make_link(near, decode=refuse)
    far.send(frame(0, payload=[1]))
    assert until_broken(link) == "bad frame: payload: Commit.token_ids: no"
    assert link.poll(0) is None


@pytest.mark.parametrize("where", ["decode", "on_receive"])
def test_unforeseen_error_breaks_the_link_instead_of_hanging_it(make_link, where):
    def fail(_):
        raise KeyError("surprise")

    near, far = MemoryTransport.pair()
    link = make_link(near, **{where: fail})
    far.send(frame(0, payload=[1]))
    assert until_broken(link) == "internal error: KeyError('surprise')"


def test_after_the_break(pair):
    """post and ping raise, poll hands out what had arrived and then None without waiting."""
    a, b = pair()
    a.post([words(1)])
    while b.counters.frames_received < 1:
        time.sleep(0.001)
    b.abort("enough")
    assert b.broken == "aborted on this side: enough"
    with pytest.raises(LinkBroken, match="enough"):
        b.post([words(1)])
    with pytest.raises(LinkBroken, match="enough"):
        b.ping()
    assert b.poll(0).messages == [1]
    start = time.monotonic()
    assert b.poll(60) is None
    assert b.poll(60) is None
    assert time.monotonic() - start < SOON_S


def test_break_wakes_a_waiting_poll_and_a_waiting_ping(make_link):
    transport, _ = MemoryTransport.pair()
    link = make_link(transport)
    outcomes = queue.SimpleQueue()

    def ping():
        try:
            link.ping(count=1, timeout_s=60)
        except LinkBroken as error:
            outcomes.put(str(error))

    waiting = [threading.Thread(target=ping), threading.Thread(target=lambda: outcomes.put(link.poll(60)))]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    link.abort("enough")
    for thread in waiting:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert {outcomes.get(), outcomes.get()} == {None, "link test0: aborted on this side: enough"}


def test_close_tells_the_peer_after_everything_posted(pair):
    reasons = []
    a, b = pair(on_broken=reasons.append)
    for value in range(100):
        a.post([words(value)])
    a.close("drafter déménage", SOON_S)
    assert a.broken == "closed on this side: drafter déménage"
    assert until_broken(b) == "closed by peer: drafter déménage"
    assert [b.poll(0).messages for _ in range(100)] == [[value] for value in range(100)]
    while not reasons:
        time.sleep(0.001)
    a.close("again")
    a.abort("again")
    assert a.broken == "closed on this side: drafter déménage"
    assert reasons == ["closed by peer: drafter déménage"], "only the peer of who closed is told"


def test_close_does_not_wait_for_a_peer_that_never_reads(make_link):
    transport, _ = MemoryTransport.pair()
    transport.peer_reads.clear()
    link = make_link(transport)
    link.post([words(1)])
    link.close("stuck", timeout_s=0.05)
    assert link.broken == "closed on this side: stuck"


def test_post_never_blocks_and_too_much_unsent_breaks_the_link(make_link):
    transport, _ = MemoryTransport.pair()
    transport.peer_reads.clear()
    reasons = []
    link = make_link(transport, max_queued_frames=10, on_broken=reasons.append)
    with pytest.raises(LinkBroken, match="send queue overflow: 10 frames unsent"):
        link.post([words(1)] * 12)  # one is in the send thread's hands
    assert reasons == [link.broken]


def test_too_much_unread_breaks_the_link(make_link):
    near, far = MemoryTransport.pair()
    link = make_link(near, max_queued_frames=3)
    for sequence in range(4):
        far.send(frame(sequence, payload=[sequence]))
    assert until_broken(link) == "inbox overflow: 3 frames unread"


def test_payload_over_capacity_breaks_the_link(make_link):
    transport, _ = MemoryTransport.pair()
    link = make_link(transport)
    link.post([np.zeros(CAPACITY, np.int32)])
    assert "does not fit a frame" in until_broken(link)


def test_lost_connection(make_link):
    near, far = MemoryTransport.pair()
    reasons = queue.SimpleQueue()
    link = make_link(near, on_broken=reasons.put)
    far.abort()
    assert reasons.get(timeout=SOON_S) == "connection lost: peer is gone"
    assert link.broken == "connection lost: peer is gone"


def test_broken_once_however_many_things_go_wrong(make_link):
    near, far = MemoryTransport.pair()
    reasons = []
    link = make_link(near, on_broken=reasons.append)
    far.send(frame(5))
    far.abort()
    until_broken(link)
    link.abort("too")
    link.close("too")
    assert len(reasons) == 1
    assert "sequence" in link.broken


def test_a_callback_may_abort_its_own_link(make_link):
    near, far = MemoryTransport.pair()
    done = threading.Event()
    link = make_link(near, on_broken=lambda _: (link.abort("from the callback"), done.set()))
    far.abort()
    assert done.wait(SOON_S)
    assert link.broken == "connection lost: peer is gone"


def test_link_that_was_never_started_can_be_ended(make_link):
    transport, _ = MemoryTransport.pair()
    link = make_link(transport, started=False)
    link.close("never mind")
    assert transport.closed


def test_abort_waits_for_nothing_and_leaves_nothing(make_link):
    """Whoever aborts may be the engine's step: neither a wire that is slow to free nor a thread that is slow to end is
    its matter."""
    transport, _ = MemoryTransport.pair()
    let_go = threading.Event()
    freed_by, plain_abort, plain_recv = [], transport.abort, transport.recv

    def slow_abort():
        freed_by.append(threading.get_ident())
        assert let_go.wait(2 * SOON_S)
        plain_abort()

    def slow_recv(buffer, timeout_s):
        try:
            plain_recv(buffer, timeout_s)
        finally:
            let_go.wait(2 * SOON_S)

    transport.abort, transport.recv = slow_abort, slow_recv
    link = make_link(transport)
    aborted = threading.Event()
    stepping = threading.Thread(target=lambda: (link.abort("hangs"), aborted.set()))
    stepping.start()
    try:
        assert aborted.wait(SOON_S), "abort waits for the wire"
        assert link.broken == "aborted on this side: hangs"
        assert link.poll(60) is None
        assert not link.join(0)
    finally:
        let_go.set()
        stepping.join()
    assert link.join(SOON_S)
    assert len(freed_by) == 1
    assert stepping.ident not in freed_by


def test_too_much_unsent_costs_whoever_posts_no_time(make_link):
    transport, _ = MemoryTransport.pair()
    transport.peer_reads.clear()
    let_go = threading.Event()
    plain_abort = transport.abort
    transport.abort = lambda: (let_go.wait(2 * SOON_S), plain_abort())
    link = make_link(transport, max_queued_frames=3)
    outcome = queue.SimpleQueue()

    def post():
        try:
            link.post([words(1)] * 5)
        except LinkBroken as error:
            outcome.put(str(error))

    posting = threading.Thread(target=post)
    posting.start()
    try:
        assert "send queue overflow" in outcome.get(timeout=SOON_S)
    finally:
        let_go.set()
        posting.join()


def test_retire_closes_and_waits_for_nothing(pair):
    a, b = pair()
    a.close = partial(a.close, timeout_s=SOON_S)
    a.post([words(1)])
    a.retire("another takes its place")
    assert until_broken(b) == "closed by peer: another takes its place"
    assert b.poll(0).messages == [1]
    assert until_broken(a) == "closed on this side: another takes its place"
