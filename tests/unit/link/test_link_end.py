"""How a link ends: closed, aborted, or broken by what it finds on the wire."""

import queue
import threading
import time

import pytest

from outrider.cluster.link import LinkBroken, LinkError
from outrider.cluster.link.link import HEADER, MAX_CLOSE_REASON_BYTES, MAX_UNREAD_FRAMES, FrameKind
from tests.unit.link.memory_wire import SOON_S, MemoryWire, frame, until, until_broken

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "bad frame: unpack_from requires"),
        (bytes(64), "bad frame: 0 is not a valid FrameKind"),
        (None, "connection lost: the peer is gone"),
    ],
)
def test_what_is_no_frame_of_this_link_breaks_it_once_and_delivers_nothing(make_link, sent, reason):
    near, far = MemoryWire.pair()
    reasons = []
    link = make_link(near, on_broken=reasons.append)
    far.outbound.put(sent)
    far.outbound.put(frame(payload=b"after"))
    assert until_broken(link).startswith(reason)
    assert link.poll(0) is None
    until(lambda: reasons)
    link.abort("too")
    link.close("too")
    assert reasons == [link.broken]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("Commit.token_ids: no"), "bad frame: Commit.token_ids: no"),
        (KeyError("surprise"), "internal error: KeyError('surprise')"),
    ],
)
def test_a_payload_that_cannot_be_decoded_breaks_the_link(make_link, error, reason):
    def refuse(payload):
        raise error

    near, far = MemoryWire.pair()
    link = make_link(near, decode=refuse)
    far.send(frame(payload=b"1"))
    assert until_broken(link) == reason
    assert link.poll(0) is None


def test_after_the_break(pair):
    """post and ping raise, poll hands out what had arrived and then None without waiting."""
    a, b = pair()
    a.post(b"1")
    until(lambda: b.counters.bytes_received)
    b.abort("enough")
    assert b.broken == "aborted on this side: enough"
    with pytest.raises(LinkBroken, match="enough"):
        b.post(b"1")
    with pytest.raises(LinkError, match="enough"):
        b.ping()
    assert b.poll(0).messages == b"1"
    start = time.monotonic()
    assert b.poll(SOON_S) is None
    assert b.poll(SOON_S) is None
    assert time.monotonic() - start < SOON_S


def test_break_wakes_a_waiting_poll_and_a_waiting_ping(make_link):
    wire, _ = MemoryWire.pair()
    link = make_link(wire)
    outcomes = queue.SimpleQueue()

    def ping():
        try:
            link.ping(count=1, timeout_s=60)
        except LinkError as error:
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
    reasons = queue.SimpleQueue()
    a, b = pair(on_broken=reasons.put)
    for value in range(100):
        a.post(bytes([value]))
    a.close("drafter déménage")
    assert until_broken(a) == "closed on this side: drafter déménage"
    assert until_broken(b) == "closed by peer: drafter déménage"
    assert [b.poll(0).messages for _ in range(100)] == [bytes([value]) for value in range(100)]
    a.close("again")
    a.abort("again")
    assert a.broken == "closed on this side: drafter déménage"
    assert {reasons.get(timeout=SOON_S) for _ in range(2)} == {a.broken, b.broken}
    assert reasons.empty(), "each end is told once"
    until(lambda: a._wire.lingered_s == 1.0)


def test_a_long_reason_is_cut_by_whoever_sends_it_and_by_whoever_reads_it(make_link):
    near, far = MemoryWire.pair()
    link = make_link(near)
    link.close("ü" * 10_000)
    sent = far.inbound.get(timeout=SOON_S)
    assert (sent[0], len(sent)) == (FrameKind.CLOSE, HEADER.size + MAX_CLOSE_REASON_BYTES)
    near, far = MemoryWire.pair()
    link = make_link(near)
    far.send(frame(FrameKind.CLOSE, b"x" * 10_000))
    assert until_broken(link) == "closed by peer: " + "x" * MAX_CLOSE_REASON_BYTES


def test_a_peer_that_does_not_read_breaks_the_link_and_close_does_not_wait_for_it(make_link):
    wire, _ = MemoryWire.pair()
    wire.is_full = True
    reasons = []
    link = make_link(wire, on_broken=reasons.append)
    with pytest.raises(LinkBroken, match="connection lost: the peer does not read"):
        link.post(b"1")
    assert reasons == [link.broken]
    wire, _ = MemoryWire.pair()
    wire.is_full = True
    link = make_link(wire)
    link.close("stuck")
    assert link.broken == "closed on this side: stuck"


def test_too_much_unread_breaks_the_link(make_link):
    near, far = MemoryWire.pair()
    link = make_link(near)
    for _ in range(MAX_UNREAD_FRAMES + 1):
        far.send(frame(payload=b"1"))
    assert until_broken(link) == f"inbox overflow: {MAX_UNREAD_FRAMES} frames unread"


def test_abort_waits_for_nothing_and_leaves_nothing(make_link):
    """Whoever aborts may be the engine's step, which must not wait for a wire that is slow to free."""
    wire, _ = MemoryWire.pair()
    let_go = threading.Event()
    freed_by, plain_end = [], wire.end

    def slow_end(linger_s):
        freed_by.append(threading.get_ident())
        assert let_go.wait(2 * SOON_S)
        plain_end(linger_s)

    wire.end = slow_end
    link = make_link(wire)
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
