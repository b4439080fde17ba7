"""What a link delivers, counts and measures, over a wire made of two queues."""

import pickle
import queue
import threading
import time
from functools import partial

import pytest

from outrider.cluster.link import LinkError, LinkInvitation
from outrider.cluster.link.frame import HEADER_WORDS, FrameKind
from tests.unit.link.memory_transport import SOON_S, MemoryTransport, frame, words

pytestmark = pytest.mark.timeout(300)


def until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_long(recv, buffer, timeout_s):
    """However soon the link would give up."""
    recv(buffer, SOON_S)


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


def test_a_frame_that_finds_nothing_before_it_is_begun_by_whoever_posts_it(make_link):
    near, far = MemoryTransport.pair()
    begun_by = queue.SimpleQueue()

    def start_send(buffer):
        begun_by.put(threading.get_ident())
        return MemoryTransport.start_send(near, buffer)

    near.start_send = start_send
    a, b = make_link(near), make_link(far)
    deadline = time.monotonic() + SOON_S
    sent = 0
    while True:  # the send thread may still be on its way to the queue
        a.post([words(sent)])
        assert b.poll(SOON_S).messages == [sent]
        sent += 1
        if begun_by.get(timeout=SOON_S) == threading.get_ident():
            break
        assert time.monotonic() < deadline, "every frame was left to the send thread"
        time.sleep(0.001)


def test_a_frame_that_the_wire_takes_at_once_wakes_nobody_here(make_link):
    """The send thread sleeps on, so that the next frame finds nothing before it either."""
    near, far = MemoryTransport.pair()
    begun_by = queue.SimpleQueue()

    def start_send(buffer):
        begun_by.put(threading.get_ident())
        near.send(buffer)

    near.start_send = start_send
    a, b = make_link(near), make_link(far)
    deadline = time.monotonic() + SOON_S
    sent = 0
    while begun_by.empty() or begun_by.get() != threading.get_ident():  # the send thread may still be on its way
        assert time.monotonic() < deadline, "every frame was left to the send thread"
        a.post([words(sent)])
        assert b.poll(SOON_S).messages == [sent]
        sent += 1
        time.sleep(0.001)
    for value in range(100):
        a.post([words(value)])
    assert {begun_by.get_nowait() for _ in range(100)} == {threading.get_ident()}
    assert [b.poll(SOON_S).messages for _ in range(100)] == [[value] for value in range(100)]
    assert a.counters.frames_sent == sent + 100
    assert a.counters.bytes_sent == 4 * (HEADER_WORDS + 1) * (sent + 100)


def test_only_what_is_in_use_is_sent_and_the_rest_of_a_longer_frame_is_never_delivered(pair):
    a, b = pair()
    sent, start_send = [], a._transport.start_send
    a._transport.start_send = lambda buffer: (sent.append(len(buffer)), start_send(buffer))[1]
    for length in (40, 3, 0, 48, 1):
        a.post([words(*range(length))])
        assert b.poll(SOON_S).messages == list(range(length))
    assert sent == [HEADER_WORDS + length for length in (40, 3, 0, 48, 1)]


def test_a_peer_that_does_not_read_delays_nobody_who_posts(make_link):
    near, far = MemoryTransport.pair()
    near.peer_reads.clear()
    a, b = make_link(near), make_link(far)
    for value in range(20):
        a.post([words(value)])
    assert b.poll(0.01) is None
    near.peer_reads.set()
    assert [b.poll(SOON_S).messages for _ in range(20)] == [[value] for value in range(20)]


def test_frames_of_many_threads_and_heartbeats_keep_their_numbers(make_link):
    """A frame out of order, or two in one buffer, breaks the link."""
    ends = MemoryTransport.pair()
    for end in ends:
        end.recv = partial(wait_long, end.recv)
    a, b = (make_link(end, deadline_s=0.4) for end in ends)
    threads, each = 4, 300

    def post(thread):
        for index in range(each):
            a.post([words(thread, index)])
            if index % 50 == 0:
                time.sleep(0.05)  # heartbeats come every 0.1 s

    posting = [threading.Thread(target=post, args=(thread,)) for thread in range(threads)]
    for thread in posting:
        thread.start()
    received = [b.poll(SOON_S).messages for _ in range(threads * each)]
    for thread in posting:
        thread.join()
    for thread in range(threads):
        assert [index for sender, index in received if sender == thread] == list(range(each))
    assert (a.broken, b.broken) == (None, None)


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
    a.ping(1, SOON_S)
    until(lambda: a.counters.bytes_sent == 4 * (2 * HEADER_WORDS + 3 + 1))  # what is sent is counted behind it
    until(lambda: b.counters.bytes_sent == 4 * (HEADER_WORDS + 1))
    assert (a.counters.frames_sent, b.counters.frames_received) == (2, 2)
    assert a.counters.bytes_sent == b.counters.bytes_received
    assert b.counters.frames_sent == a.counters.frames_received == 1
    assert a.counters.last_receive_monotonic_s <= time.monotonic()


def test_ping(pair):
    a, b = pair()
    stats = a.ping(5, SOON_S)
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
    link.ping(1, SOON_S)


class Outgoing(queue.SimpleQueue):
    """What a link sends, and how long it waits for that before a heartbeat."""

    waited_s = 0.0

    def get(self, timeout):
        self.waited_s = max(self.waited_s, timeout)
        return super().get(timeout=timeout)


def test_heartbeats_keep_an_idle_link(make_link):
    """They come in time, whenever this machine runs who waits for them."""
    ends = MemoryTransport.pair()
    for end in ends:
        end.recv = partial(wait_long, end.recv)
    links = [make_link(end, deadline_s=0.4, started=False) for end in ends]
    for link in links:
        link._outgoing = Outgoing()
        link.start()
    for link in links:
        until(lambda link=link: link.counters.frames_received >= 3)
        assert link._outgoing.waited_s <= 0.4 / 2
        assert link.poll(0) is None
        assert link.broken is None


def test_invitation_travels_by_pickle():
    invitation = LinkInvitation(3, "gloo", "127.0.0.1", 1234, 4096, 100.0, 500.0, 32000, 4, "verifier-0", True)
    assert pickle.loads(pickle.dumps(invitation)) == invitation
