"""What a link delivers, counts and measures, over a wire made of two queues."""

import pickle
import queue
import threading

import pytest

from outrider.cluster.link import LinkError, host_link
from outrider.cluster.link.link import FrameKind
from tests.support.clock import Clock
from tests.unit.link.memory_wire import SOON_S, MemoryWire, frame, until

pytestmark = pytest.mark.timeout(120)


def test_frames_arrive_in_order_with_their_work(pair):
    a, b = pair()
    a.post(b"one")
    a.post(b"two", work_us=77)
    received = [b.poll(SOON_S) for _ in range(2)]
    assert [(each.messages, each.work_us, each.nbytes) for each in received] == [(b"one", 0, 12), (b"two", 77, 12)]
    b.post(b"back")
    assert a.poll(SOON_S).messages == b"back"
    assert (a.broken, b.broken) == (None, None)
    assert a.poll(0) is None
    assert a.poll(0.01) is None


def test_frames_of_many_threads_arrive_each_in_its_order(pair):
    a, b = pair()
    threads, each = 4, 300

    def post(thread):
        for index in range(each):
            a.post(bytes([thread, index % 256]))

    posting = [threading.Thread(target=post, args=(thread,)) for thread in range(threads)]
    for thread in posting:
        thread.start()
    received = [tuple(b.poll(SOON_S).messages) for _ in range(threads * each)]
    for thread in posting:
        thread.join()
    for thread in range(threads):
        assert [index for sender, index in received if sender == thread] == [index % 256 for index in range(each)]


def test_on_receive_replaces_the_inbox(make_link):
    """One queue can serve many links."""
    arrivals = queue.SimpleQueue()
    ends = []
    for tag in ("x", "y"):
        near, far = MemoryWire.pair()
        make_link(near, on_receive=lambda received, tag=tag: arrivals.put((tag, received.messages)))
        ends.append(make_link(far))
    ends[0].post(b"1")
    assert arrivals.get(timeout=SOON_S) == ("x", b"1")
    ends[1].post(b"2")
    assert arrivals.get(timeout=SOON_S) == ("y", b"2")


def test_a_ping_that_is_not_answered_is_given_up(make_link):
    near, _ = MemoryWire.pair()
    link = make_link(near)
    with pytest.raises(LinkError, match=r"no answer to a ping within 0\.0 s"):
        link.ping(count=1, timeout_s=0.02)
    assert link.broken is None


class TimedWire:
    """Waits in a clock's time. says: what the peer sends at each whole second; None: nothing, then it leaves."""

    backend = "timed"

    def __init__(self, clock, says):
        self._clock, self._says = clock, says
        self.beats = []

    def send(self, data):
        assert data == frame(FrameKind.HEARTBEAT)
        self.beats.append(self._clock.now)

    def recv(self, timeout_s):
        self._clock.now += min(timeout_s, 1.0)
        return self._says(self._clock.now)

    def end(self, linger_s=0.0):
        pass


def test_a_heartbeat_goes_out_every_quarter_of_the_deadline(make_link):
    """However much is received meanwhile; a peer may be late by three of them."""
    clock = Clock()
    wire = TimedWire(clock, lambda now: frame() if now < 32 else frame(FrameKind.CLOSE))
    link = make_link(wire, deadline_s=8.0, clock=clock)
    until(lambda: link.broken is not None)
    assert wire.beats[:15] == [2.0 * (1 + index) for index in range(15)]


def test_silence_breaks_the_link_at_its_deadline(make_link):
    clock = Clock()
    link = make_link(TimedWire(clock, lambda now: frame() if now < 4 else None), deadline_s=8.0, clock=clock)
    until(lambda: link.broken is not None)
    assert link.broken == "link deadline of 8 s passed: the peer sent nothing, or did not read"
    assert 11 < clock.now < 13


def test_an_address_travels_by_pickle_and_shows_no_secret():
    address, _ = host_link("127.0.0.1", "auto")
    assert pickle.loads(pickle.dumps(address)) == address
    assert address.key
    assert repr(address.key) not in repr(address)
