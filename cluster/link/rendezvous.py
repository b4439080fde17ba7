"""How the two ends of a link find each other.

The verifier hosts a key-value store and hands out an invitation, which travels over Ray. The drafter joins with it.
Both say hello at the store first, each waiting for the other only so long, and show that they hold the application's
secret (authentication.py); then the transport connects. When it has, the store is closed: whoever reaches it can write
to it. torch is imported only when a link is really made, so that frames and messages stay cheap to import.

Which wire it is may depend on where the two are: the verifier then listens on a local socket too, and the drafter, who
has tried it, says at the store whether that is the one. Whoever else writes there can only have the two disagree, and
then there is no link.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from outrider.cluster.backends import DEVICE_BACKENDS, Backend
from outrider.cluster.link import local_transport
from outrider.cluster.link.authentication import HELLO_NONCE_BYTES, Handshake, SealedTransport, new_hello
from outrider.cluster.link.link import LinkError, Transport, TransportError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

logger = logging.getLogger(__name__)

VERIFIER_RANK, DRAFTER_RANK = 0, 1
_ROLES = ("verifier", "drafter")
"""By rank."""

_LONGEST_ADDRESS = 255

_WIRE, _NO_WIRE = "drafter/wire", "none"
"""Key of the store, and the value of a drafter that leaves: it was to be the local socket, and cannot be."""

_NOT_LOCAL = "link.backend: local is for two processes of one machine; set auto"


@dataclass(frozen=True, slots=True)
class LinkInvitation:
    """All a drafter has to know to join one verifier's link. Picklable."""

    epoch: int
    backend: Backend
    """auto: a local socket where both ends are on one machine and the drafter reaches it, else Gloo."""

    store_host: str
    store_port: int
    capacity_words: int
    """Length of a whole frame, header included, in both directions."""

    round_deadline_ms: float
    link_deadline_ms: float
    vocab_size: int
    num_speculative_tokens: int
    verifier_id: str
    sealed: bool
    """Frames carry a keyed MAC."""

    vocabulary: tuple[str, ...] = ()
    """What the target's token ids mean (vocabulary.Marks); (): not known."""

    machine: str = ""
    """The verifier's (local_transport.machine)."""

    socket_name: str = ""
    """Of its local socket; "" where there is none."""


CompleteLink = Callable[[float], Transport]
"""Call once with a timeout in seconds: waits for the drafter and returns the transport, or raises LinkError."""


def host_link(
    *,
    host: str,
    epoch: int,
    backend: Backend,
    capacity_words: int,
    round_deadline_ms: float,
    link_deadline_ms: float,
    vocab_size: int,
    num_speculative_tokens: int,
    verifier_id: str,
    secret: bytes,
    sealed: bool,
    vocabulary: tuple[str, ...] = (),
    device: str | None = None,
) -> tuple[LinkInvitation, CompleteLink]:
    """Verifier's side: open a store on a free port of `host` and invite one drafter.

    host: the address of this machine that the drafter can reach; loopback when both share a machine. Nothing
    listens on any other interface.
    secret: of the application. sealed, vocabulary: see LinkInvitation.
    device: of the verifier, for a link of DEVICE_BACKENDS; None: the first.
    Drop the returned function, or let it fail, and the store is gone. Raises LinkError when `host` cannot be bound, and
    for a local link where there are no local sockets.
    """
    machine = local_transport.machine() if backend in ("auto", "local") else ""
    if backend == "local" and not machine:
        raise LinkError("link.backend: local needs Linux, with /proc; set auto")
    store: list[TCPStore] = [open_store(host)]
    invitation = LinkInvitation(
        epoch=epoch,
        backend=backend,
        store_host=host,
        store_port=store[0].port,
        capacity_words=capacity_words,
        round_deadline_ms=round_deadline_ms,
        link_deadline_ms=link_deadline_ms,
        vocab_size=vocab_size,
        num_speculative_tokens=num_speculative_tokens,
        verifier_id=verifier_id,
        sealed=sealed,
        vocabulary=vocabulary,
        machine=machine,
        socket_name=local_transport.new_name() if machine else "",
    )

    def complete(timeout_s: float) -> Transport:
        if not store:
            raise LinkError(f"link of {verifier_id}, epoch {epoch}: this invitation was used up; host a new link")
        server = store.pop()
        check_device(invitation.backend)
        # A transport keeps its store for as long as it lives. This one is a client, so that the server can go.
        try:
            client = _client(server.host, server.port, timeout_s)
        except RuntimeError as error:
            raise LinkError(f"{_who(invitation)}: its own store does not answer: {_first_line(error)}") from error
        with _listener(invitation) or nullcontext() as listener:
            return _connect(client, VERIFIER_RANK, invitation, secret, host, timeout_s, device, listener)

    return invitation, complete


def join_link(invitation: LinkInvitation, secret: bytes, timeout_s: float) -> Transport:
    """Drafter's side: answer an invitation. secret: of the application. Raises LinkError when the verifier is not there
    in time or does not hold the secret, and for frames without a MAC from another machine."""
    check_device(invitation.backend)
    host, port = invitation.store_host, invitation.store_port
    if not invitation.sealed and not ipaddress.ip_address(host).is_loopback:
        raise LinkError(f"{_who(invitation)}: frames without a MAC are for one machine, not for a verifier at {host}")
    deadline = time.monotonic() + timeout_s
    try:
        # Tells in one line what TCPStore tells in three stack traces, and which of our addresses reaches the peer.
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            local_host = probe.getsockname()[0]
        store = _client(host, port, deadline - time.monotonic())
    except (OSError, RuntimeError) as error:
        raise LinkError(f"{_who(invitation)}: no answer at {host}:{port}: {_first_line(error)}") from error
    return _connect(store, DRAFTER_RANK, invitation, secret, local_host, deadline - time.monotonic(), None)


def _listener(invitation: LinkInvitation) -> socket.socket | None:
    """The verifier's local socket, where there is to be one."""
    if not invitation.socket_name:
        return None
    try:
        return local_transport.listen(invitation.socket_name)
    except TransportError as error:
        if invitation.backend == "local":
            raise LinkError(f"{_who(invitation)}: {error}; set link.backend: auto") from error
        _say_once(f"{invitation.verifier_id}: {error}: Gloo carries its links")
        return None  # the drafter finds that out by itself


def check_device(backend: str) -> None:
    """Raises LinkError for a backend that this process cannot have."""
    if (device_type := DEVICE_BACKENDS.get(backend)) is not None:
        from outrider.cluster.link.transport import DeviceTransport

        DeviceTransport.check(backend, device_type)


def _client(host: str, port: int, timeout_s: float) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(host, port, None, False, timeout=_seconds(max(timeout_s, 0.001)), wait_for_workers=False)


def open_store(host: str, world_size: int | None = None, *, shared: bool = False) -> TCPStore:
    """A key-value store on a free port of `host`, an address of this machine, and on no other interface.

    world_size: None when any number may come. shared: whoever opens one on the same port in this process gets this one.
    Raises LinkError when `host` cannot be bound.
    """
    from torch.distributed import TCPStore

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise LinkError(f"link host {host!r}: cannot listen there: {error}; give an address of this machine") from error
    port = listener.getsockname()[1]
    try:
        # TCPStore left to itself listens on every interface.
        return TCPStore(
            host, port, world_size, True, timeout=_seconds(10), wait_for_workers=False, multi_tenant=shared,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        raise LinkError(f"link host {host!r}: no store on port {port}: {_first_line(error)}") from error


def _connect(
    store: Store,
    rank: int,
    invitation: LinkInvitation,
    secret: bytes,
    local_host: str,
    timeout_s: float,
    device: str | None,
    listener: socket.socket | None = None,
) -> Transport:
    """listener: the verifier's local socket."""
    from torch.distributed import PrefixStore

    role, peer = _ROLES[rank], _ROLES[1 - rank]
    deadline = time.monotonic() + timeout_s
    store = PrefixStore(f"link/{invitation.epoch}", store)
    transport: Transport | None = None
    try:
        handshake = _meet(store, rank, invitation, secret, local_host, deadline)
        if invitation.socket_name:
            transport = _local_transport(store, rank, invitation, handshake, deadline, listener)
        if transport is None:
            transport = _transport(store, rank, invitation, local_host, max(deadline - time.monotonic(), 0.001), device)
        # The store goes with the verifier's own end of it, so the last word there is the drafter's, who reads no more.
        if rank == VERIFIER_RANK:
            store.set(f"{role}/connected", "")
        store.wait([f"{peer}/connected"], _until(deadline))
        if rank == DRAFTER_RANK:
            store.set(f"{role}/connected", "")
    except RuntimeError as error:
        if transport is not None:
            transport.abort()
        if isinstance(error, LinkError):
            raise
        raise LinkError(f"{_who(invitation)}: no {peer} within {timeout_s:.1f} s: {_first_line(error)}") from error
    if not invitation.sealed:
        return transport
    return SealedTransport(transport, send_key=handshake.frame_key(role), receive_key=handshake.frame_key(peer))


def _meet(
    store: Store, rank: int, invitation: LinkInvitation, secret: bytes, local_host: str, deadline: float
) -> Handshake:
    """Raises RuntimeError when the peer is not there in time, LinkError when it does not hold the secret."""
    role, peer = _ROLES[rank], _ROLES[1 - rank]
    hellos = {role: new_hello(local_host)}
    store.set(role, hellos[role])
    store.wait([peer], _until(deadline))
    hellos[peer] = store.get(peer)
    if len(hellos[peer]) > HELLO_NONCE_BYTES + _LONGEST_ADDRESS:
        raise LinkError(f"{_who(invitation)}: what came from the {peer}'s side is no hello; somebody else is there")
    handshake = Handshake(secret, repr(invitation), (hellos[_ROLES[VERIFIER_RANK]], hellos[_ROLES[DRAFTER_RANK]]))
    store.set(f"{role}/proof", handshake.proof(role))
    store.wait([f"{peer}/proof"], _until(deadline))
    if not handshake.proves(peer, store.get(f"{peer}/proof")):
        raise LinkError(
            f"{_who(invitation)}: the {peer}'s side does not hold the application's secret; nothing was sent. Somebody "
            "else reaches this link's rendezvous, or the registry was made anew meanwhile and the next try helps"
        )
    return handshake


def _local_transport(
    store: Store,
    rank: int,
    invitation: LinkInvitation,
    handshake: Handshake,
    deadline: float,
    listener: socket.socket | None,
) -> Transport | None:
    """None: another wire it is. Raises LinkError where there must be none, or the local one fails."""
    verifiers, drafters = (handshake.socket_word(role) for role in _ROLES)
    if rank == DRAFTER_RANK:
        finish = _dial(store, invitation, drafters, verifiers, deadline)
        if finish is None:
            return None
        connected = finish()
    else:
        store.wait([_WIRE], _until(deadline))
        said = store.get(_WIRE).decode("ascii", "replace")
        if said == _NO_WIRE:
            raise LinkError(f"{_who(invitation)}: the drafter is not where it could reach a local socket; {_NOT_LOCAL}")
        if said != "local" or listener is None:
            return None
        connected = local_transport.accept(listener, verifiers, drafters, deadline)
    return local_transport.LocalTransport(
        connected, invitation.capacity_words, send_timeout_s=invitation.link_deadline_ms / 1000
    )


def _dial(
    store: Store, invitation: LinkInvitation, own_word: bytes, peer_word: bytes, deadline: float
) -> Callable[[], socket.socket] | None:
    """The drafter's side: try the verifier's local socket, and tell it which wire it is."""
    try:
        if invitation.machine != local_transport.machine():
            raise TransportError("the verifier is on another machine")
        finish = local_transport.dial(invitation.socket_name, own_word, peer_word, deadline)
    except TransportError as error:
        if invitation.backend == "local":
            store.set(_WIRE, _NO_WIRE)
            raise LinkError(f"{_who(invitation)}: {error}; {_NOT_LOCAL}") from error
        store.set(_WIRE, "gloo")
        if invitation.machine == local_transport.machine():
            _say_once(f"{invitation.verifier_id} is on this machine, but {error}: Gloo carries its links")
        return None
    store.set(_WIRE, "local")
    return finish


@functools.lru_cache(maxsize=1024)
def _say_once(text: str) -> None:
    logger.info("%s", text)


def _transport(
    store: Store, rank: int, invitation: LinkInvitation, local_host: str, connect_timeout_s: float, device: str | None
) -> Transport:
    send_timeout_s = invitation.link_deadline_ms / 1000
    if invitation.backend in ("gloo", "auto"):
        from outrider.cluster.link.transport import GlooTransport

        return GlooTransport(
            store, rank, local_host=local_host, connect_timeout_s=connect_timeout_s, send_timeout_s=send_timeout_s
        )
    if (device_type := DEVICE_BACKENDS.get(invitation.backend)) is not None:
        from outrider.cluster.link.transport import DeviceTransport

        return DeviceTransport(
            store,
            rank,
            backend=invitation.backend,
            device=device or device_type,
            capacity_words=invitation.capacity_words,
            connect_timeout_s=connect_timeout_s,
            send_timeout_s=send_timeout_s,
        )
    raise LinkError(f"{_who(invitation)}: backend {invitation.backend!r} is none of {', '.join(get_args(Backend))}")


def _who(invitation: LinkInvitation) -> str:
    return f"link of {invitation.verifier_id}, epoch {invitation.epoch}"


def _until(deadline: float) -> datetime.timedelta:
    return _seconds(max(deadline - time.monotonic(), 0.001))


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
