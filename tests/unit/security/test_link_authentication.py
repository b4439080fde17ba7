"""Who may be the other end of a link, and whose frames it takes. Wires are real: a TCPStore, Gloo on loopback, and a
local socket."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from outrider.cluster.link import FrameError, Link, LinkError, LinkInvitation, Transport, host_link, join_link
from outrider.cluster.link.authentication import Handshake, SealedTransport, new_hello, new_secret
from outrider.cluster.link.frame import TAG_WORDS, FrameKind, decode, encode
from tests.unit.link.memory_transport import CAPACITY, SOON_S, MemoryTransport, frame, until_broken, words

pytestmark = pytest.mark.timeout(120)

HANG_S = 30.0
SECRET = bytes(range(32))
KEYS = {"send_key": b"k" * 32, "receive_key": b"l" * 32}


def invite(**changes: Any) -> tuple[LinkInvitation, Callable[[float], Transport]]:
    arguments: dict[str, Any] = {
        "host": "127.0.0.1",
        "epoch": 1,
        "backend": "gloo",
        "capacity_words": CAPACITY,
        "round_deadline_ms": 100,
        "link_deadline_ms": 60_000,
        "vocab_size": 1000,
        "num_speculative_tokens": 4,
        "verifier_id": "v",
        "secret": SECRET,
        "sealed": True,
    }
    return host_link(**arguments | changes)


def meet(complete: Callable[[float], Transport], join: Callable[[], Transport]) -> list[Any]:
    """What becomes of both ends: a transport, or the error."""
    outcomes: list[Any] = [None, None]

    def run(index: int, end: Callable[[], Transport]) -> None:
        try:
            outcomes[index] = end()
        except LinkError as error:
            outcomes[index] = error

    threads = [
        threading.Thread(target=run, args=(index, end)) for index, end in enumerate([lambda: complete(HANG_S), join])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.fixture(params=["gloo", "local"])
def ends(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Both ends of a real link on loopback."""
    made: list[Any] = []

    def make(**changes: Any) -> list[Any]:
        invitation, complete = invite(**{"backend": request.param} | changes)
        made.extend(meet(complete, lambda: join_link(invitation, SECRET, HANG_S)))
        return made[-2:]

    yield make
    for end in made:
        end.abort()


# The rendezvous.


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_process_without_the_secret_is_no_drafter(backend: str) -> None:
    """It knows all of the invitation, and comes before the drafter."""
    invitation, complete = invite(backend=backend)
    verifier, stranger = meet(complete, lambda: join_link(invitation, new_secret(), HANG_S))
    assert "the drafter's side does not hold the application's secret" in str(verifier)
    assert "the verifier's side does not hold the application's secret" in str(stranger)


def test_a_process_without_the_secret_is_no_verifier() -> None:
    """A drafter that is sent to a stranger's store tells it nothing."""
    invitation, complete = invite(secret=new_secret())
    stranger, drafter = meet(complete, lambda: join_link(invitation, SECRET, HANG_S))
    assert isinstance(stranger, LinkError)
    assert "the verifier's side does not hold the application's secret; nothing was sent" in str(drafter)


@pytest.mark.parametrize("said", ["the same back", "rubbish", "very much"])
def test_whoever_only_reaches_the_store_gets_no_link(said: str) -> None:
    """Not by giving back what the verifier says, either."""
    from torch.distributed import PrefixStore, TCPStore

    invitation, complete = invite()

    def foreign() -> Transport:
        client = TCPStore(invitation.store_host, invitation.store_port, None, False, wait_for_workers=False)
        store = PrefixStore("link/1", client)
        answers = {"the same back": store.get("verifier"), "rubbish": b"\0" * 40, "very much": b"x" * 100_000}
        store.set("drafter", answers[said])
        if said == "the same back":
            answers[said] = store.get("verifier/proof")
        store.set("drafter/proof", answers[said])
        raise LinkError("has said what it can")

    verifier, _ = meet(complete, foreign)
    assert isinstance(verifier, LinkError)
    assert "somebody else" in str(verifier).lower()


def test_an_invitation_that_was_changed_on_its_way_joins_nothing() -> None:
    """To frames without a MAC, for one."""
    invitation, complete = invite()
    changed = dataclasses.replace(invitation, sealed=False)
    outcomes = meet(complete, lambda: join_link(changed, SECRET, HANG_S))
    assert [isinstance(outcome, LinkError) for outcome in outcomes] == [True, True]


def test_frames_without_a_mac_stay_on_one_machine() -> None:
    invitation, complete = invite(sealed=False)
    with pytest.raises(LinkError, match=r"without a MAC are for one machine, not for a verifier at 192\.0\.2\.1"):
        join_link(dataclasses.replace(invitation, store_host="192.0.2.1"), SECRET, 1)
    del complete


def test_what_was_shown_once_is_of_no_use_again() -> None:
    hellos = new_hello("10.0.0.1"), new_hello("10.0.0.2")
    once = Handshake(SECRET, "an invitation", hellos)
    again = Handshake(SECRET, "an invitation", (new_hello("10.0.0.1"), hellos[1]))
    assert once.proves("drafter", once.proof("drafter"))
    assert not again.proves("drafter", once.proof("drafter"))
    assert not once.proves("drafter", once.proof("verifier"))
    roles = ("drafter", "verifier")
    shown = [use(role) for use in (once.proof, once.socket_word, once.frame_key) for role in roles]
    assert len(set(shown)) == 6, "nor does what is shown give a key away"
    assert SECRET.hex() not in repr(once)
    assert repr(SECRET) not in repr(once)


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("sealed", [True, False])
def test_the_rendezvous_is_closed_when_both_are_there(sealed: bool, backend: str) -> None:
    """The local socket with it."""
    invitation, complete = invite(sealed=sealed, backend=backend)
    here, there = meet(complete, lambda: join_link(invitation, SECRET, HANG_S))
    try:
        listening = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}
        assert (invitation.store_host, invitation.store_port) not in listening
        assert (backend == "local") == bool(invitation.socket_name)
        if invitation.socket_name:
            with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as late:
                late.connect(f"\0{invitation.socket_name}")
        finish = here.start_send(frame(0, payload=[7]))
        received = np.zeros(CAPACITY, np.int32)
        there.recv(received, HANG_S)
        if finish is not None:
            finish()
        assert decode(received, 1, 0).payload.tolist() == [7]
    finally:
        here.abort()
        there.abort()


# The frames.


def linked(transport: Transport) -> Link[list[int]]:
    link = Link(
        transport, epoch=1, capacity_words=CAPACITY, link_deadline_s=60.0, decode=np.ndarray.tolist, name="sealed"
    )
    link.start()
    return link


def test_sealed_frames_go_both_ways(ends: Callable[..., list[Any]]) -> None:
    here, there = (linked(end) for end in ends())
    for value in range(3):
        here.post([words(value), words(*range(value))])
        assert [there.poll(SOON_S).messages for _ in range(2)] == [[value], list(range(value))]
        there.post([words(-value)])
        assert here.poll(SOON_S).messages == [-value]
    assert here.ping(4).max_us > 0
    assert (here.broken, there.broken) == (None, None)
    there.abort("end of test")
    here.abort("end of test")


def test_a_forged_frame_breaks_the_link(ends: Callable[..., list[Any]]) -> None:
    """It has the right epoch, number and checksum, as anybody on the way could make it."""
    here, there = ends()
    taken = linked(here)
    sending = there._transport.start_send(frame(0, payload=[1, 2, 3]))  # kept: a send that nobody holds may be dropped
    assert until_broken(taken) == "bad frame: mac: this is not the next frame that the peer has sealed"
    assert taken.poll(0) is None
    assert taken.join(SOON_S)
    del sending


def test_a_repeated_frame_breaks_the_link(ends: Callable[..., list[Any]]) -> None:
    here, there = ends()
    taken = linked(here)
    buffer = frame(0, payload=[5])
    if (finish := there.start_send(buffer)) is not None:
        finish()
    assert taken.poll(SOON_S).messages == [5]
    sending = there._transport.start_send(buffer)
    assert until_broken(taken).startswith("bad frame: mac:")
    assert taken.join(SOON_S)
    del sending


def pipe() -> tuple[MemoryTransport, SealedTransport, SealedTransport]:
    """The wire between, and both ends."""
    near, far = MemoryTransport.pair()
    far_keys = {"send_key": KEYS["receive_key"], "receive_key": KEYS["send_key"]}
    return near, SealedTransport(near, **KEYS), SealedTransport(far, **far_keys)


def sealed_frames(count: int) -> tuple[SealedTransport, list[np.ndarray]]:
    """A receiver, and what was sealed for it."""
    _near, sender, receiver = pipe()
    sealed = []
    for sequence in range(count):
        buffer = frame(sequence, payload=[10 + sequence])
        sender.start_send(buffer)
        sealed.append(buffer.copy())
    return receiver, sealed


def receive(receiver: SealedTransport, sent: np.ndarray) -> np.ndarray:
    receiver._transport.inbound.put(sent)
    buffer = np.zeros(CAPACITY, np.int32)
    receiver.recv(buffer, SOON_S)
    return buffer


def test_every_bit_in_use_counts_and_no_other() -> None:
    _, sealed = sealed_frames(1)
    used = 17
    for word in range(used):
        for bit in (0, 13, 31):
            receiver, _ = sealed_frames(0)
            damaged = sealed[0].copy()
            damaged.view(np.uint32)[word] ^= np.uint32(1 << bit)
            with pytest.raises(FrameError, match=r"^(mac|length):"):
                receive(receiver, damaged)
    receiver, _ = sealed_frames(0)
    padded = sealed[0].copy()
    padded[used:] = 99
    assert decode(receive(receiver, padded), 1, 0).payload.tolist() == [10]


def test_frames_come_in_their_order_or_not_at_all() -> None:
    receiver, sealed = sealed_frames(3)
    receive(receiver, sealed[0])
    with pytest.raises(FrameError, match=r"^mac:"):
        receive(receiver, sealed[2])


def test_a_frame_cut_short_is_not_completed_by_the_one_before() -> None:
    receiver, _ = sealed_frames(0)
    _near, sender, _ = pipe()
    buffer, into = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.int32)
    for sequence in range(2):
        used = encode(buffer, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=np.full(30, sequence, np.int32))
        sender.start_send(buffer[:used])
        receiver._transport.inbound.put(buffer[: used - 20 * sequence].copy())
        if sequence == 0:
            receiver.recv(into, SOON_S)
            assert decode(into, 1, 0).payload.tolist() == [0] * 30
    with pytest.raises(FrameError, match=r"^mac:"):
        receiver.recv(into, SOON_S)


def test_a_number_that_comes_round_again_is_another_number() -> None:
    """The header's wraps; a frame of the round before must not be taken for the next one."""
    _near, sender, receiver = pipe()
    first = frame(0, payload=[1])
    sender.start_send(first)
    recorded = first.copy()
    receive(receiver, recorded.copy())
    again = frame(0, payload=[1])
    sender.start_send(again)
    assert (again[TAG_WORDS] != recorded[TAG_WORDS]).any()
    with pytest.raises(FrameError, match=r"^mac:"):
        receive(receiver, recorded)


def test_a_frame_sent_back_to_its_sender_is_none_of_the_peer_s() -> None:
    near, sender, _ = pipe()
    buffer = frame(0, payload=[1])
    sender.start_send(buffer)
    near.inbound.put(buffer)
    with pytest.raises(FrameError, match=r"^mac:"):
        sender.recv(np.zeros(CAPACITY, np.int32), SOON_S)


def test_a_plain_frame_is_no_sealed_one() -> None:
    receiver, _ = sealed_frames(0)
    buffer = np.zeros(CAPACITY, np.int32)
    encode(buffer, epoch=1, sequence=0, kind=FrameKind.DATA, payload=words(1))
    with pytest.raises(FrameError, match=r"^mac:"):
        receive(receiver, buffer)


def test_a_link_says_nothing_of_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    invitation, complete = invite()
    verifier, stranger = meet(complete, lambda: join_link(invitation, new_secret(), HANG_S))
    told = f"{caplog.text} {invitation!r} {verifier} {stranger}"
    assert SECRET.hex() not in told
    assert repr(SECRET) not in told
