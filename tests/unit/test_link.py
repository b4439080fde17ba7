"""The link's rules, over a wire made of two queues."""

import pickle
import queue
import threading
import time

import numpy as np
import pytest

from cluster.link import Link, LinkBroken, LinkError, LinkInvitation, TransportClosed, TransportTimeout
from cluster.link.frame import HEADER_WORDS, FrameKind, encode

pytestmark = pytest.mark.timeout(30)

CAPACITY = 64
SOON_S = 5.0
"""Upper bound for what takes microseconds: a guard against hanging, not a measurement."""


class MemoryTransport:
    """One end of a pair of queues, with a Transport's contract."""

    def __init__(self, inbound, outbound):
        self.inbound, self.outbound = inbound, outbound
        self.closed = False
        self.peer_reads = threading.Event()
        self.peer_reads.set()

    @classmethod
    def pair(cls):
        a, b = queue.SimpleQueue(), queue.SimpleQueue()
        return cls(a, b), cls(b, a)

    def send(self, buffer):
        self.peer_reads.wait()
        if self.closed:
            raise TransportClosed("aborted on this side")
        self.outbound.put(buffer.copy())

    def recv(self, buffer, timeout_s):
        if self.closed:
            raise TransportClosed("aborted on this side")
        try:
            frame = self.inbound.get(timeout=timeout_s)
        except queue.Empty:
            raise TransportTimeout("recv timed out") from None
        if frame is None:
            raise TransportClosed("peer is gone")
        buffer[:] = frame

    def abort(self):
        self.closed = True
        self.peer_reads.set()
        self.inbound.put(None)
        self.outbound.put(None)


@pytest.fixture
def make_link():
    links = []

    def make(transport, deadline_s=60.0, epoch=1, decode=np.ndarray.tolist, started=True, **options):
        link = Link(
            transport,
            epoch=epoch,
            capacity_words=CAPACITY,
            link_deadline_s=deadline_s,
            decode=decode,
            name=f"test{len(links)}",
            **options,
        )
        links.append(link)
        if started:
            link.start()
        return link

    yield make
    for link in links:
        link.abort("end of test")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("test")]
    assert left == [], "threads survived their link"


@pytest.fixture
def pair(make_link):
    def make(**options):
        a, b = MemoryTransport.pair()
        return make_link(a, **options), make_link(b, **options)

    return make


def words(*values):
    return np.array(values, dtype=np.int32)


def frame(sequence, kind=FrameKind.DATA, payload=(), epoch=1):
    buffer = np.zeros(CAPACITY, dtype=np.int32)
    encode(buffer, epoch=epoch, sequence=sequence, kind=kind, payload=words(*payload))
    return buffer


def until_broken(link):
    deadline = time.monotonic() + SOON_S
    while link.broken is None:
        assert time.monotonic() < deadline, "the link never broke"
        time.sleep(0.001)
    return link.broken


def test_frames_arrive_in_order_with_their_numbers(pair):
    a, b = pair()
    a.post([words(1, 2), words(3)], work_us=77)
    first, second = b.poll(SOON_S), b.poll(SOON_S)
    assert (first.messages, first.work_us, first.nbytes) == ([1, 2], 0, 4 * (HEADER_WORDS + 2))
    assert (second.messages, second.work_us, second.nbytes) == ([3], 77, 4 * (HEADER_WORDS + 1))
    assert (first.sequence, second.sequence) == (0, 1)
    b.post([words(9)])
    assert a.poll(SOON_S).messages == [9]
    assert a.broken is None
    assert b.broken is None


def test_poll_without_waiting_and_without_news(pair):
    a, _ = pair()
    assert a.poll(0) is None
    assert a.poll(0.01) is None
    assert a.broken is None


def test_on_receive_replaces_the_inbox(make_link):
    """One queue can serve many links."""
    arrivals = queue.SimpleQueue()
    ends = []
    for tag in ("x", "y"):
        near, far = MemoryTransport.pair()
        make_link(near, on_receive=lambda received, tag=tag: arrivals.put((tag, received.messages)))
        ends.append(make_link(far))
    ends[0].post([words(1)])
    assert arrivals.get(timeout=SOON_S) == ("x", [1])
    ends[1].post([words(2)])
    assert arrivals.get(timeout=SOON_S) == ("y", [2])


def test_counters(pair):
    a, b = pair()
    a.post([words(1, 2, 3)])
    b.poll(SOON_S)
    a.ping(count=1)  # its answer comes after the counting of what was sent before
    assert (a.counters.frames_sent, b.counters.frames_received) == (2, 2)
    assert a.counters.bytes_sent == b.counters.bytes_received == 4 * (2 * HEADER_WORDS + 3 + 1)
    assert b.counters.frames_sent == a.counters.frames_received == 1
    assert a.counters.last_receive_monotonic_s <= time.monotonic()


def test_ping(pair):
    a, b = pair()
    stats = a.ping(count=5)
    assert 0 < stats.min_us <= stats.median_us <= stats.max_us
    assert b.poll(0) is None
    assert b.counters.frames_received == 5


def test_ping_that_is_not_answered(make_link):
    transport, _ = MemoryTransport.pair()
    link = make_link(transport)
    with pytest.raises(LinkError, match=r"no answer to a ping within 0\.0 s"):
        link.ping(count=1, timeout_s=0.02)
    assert link.broken is None


def test_a_late_pong_is_not_taken_for_the_next_ones(make_link):
    """The answer to a ping that was given up arrives first, and must not end the next ping."""
    near, far = MemoryTransport.pair()
    link = make_link(near)
    with pytest.raises(LinkError):
        link.ping(count=1, timeout_s=0.02)
    far.send(frame(0, FrameKind.PONG, [1]))
    with pytest.raises(LinkError):
        link.ping(count=1, timeout_s=0.02)
    far.send(frame(1, FrameKind.PONG, [3]))
    link.ping(count=1)


def test_silence_breaks_the_link(make_link):
    transport, _ = MemoryTransport.pair()
    reasons = queue.SimpleQueue()
    link = make_link(transport, deadline_s=0.05, on_broken=reasons.put)
    assert reasons.get(timeout=SOON_S) == link.broken
    assert link.broken == "link deadline of 0.05 s passed: recv timed out"


def test_heartbeats_keep_an_idle_link(pair):
    a, b = pair(deadline_s=0.4)
    time.sleep(1.0)
    assert a.broken is None
    assert b.broken is None
    assert a.counters.frames_received >= 2
    assert a.poll(0) is None


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
    a.close("drafter déménage")
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


def test_invitation_travels_by_pickle():
    invitation = LinkInvitation(3, "gloo", "127.0.0.1", 1234, 4096, 100.0, 500.0, 32000, 4, "verifier-0")
    assert pickle.loads(pickle.dumps(invitation)) == invitation
