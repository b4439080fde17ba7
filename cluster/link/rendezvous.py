"""How the two ends of a link find each other.

The verifier listens and makes an invitation, which holds the addresses, a key and a token, all of them made for this
link. Ray carries it to the drafter, so whoever holds it was invited by this application. The drafter connects and says
hello with the token, and the verifier answers. Where a device's memory is moved, the answer holds the
port of the store at which the device's groups meet.

torch is imported only for a device's link, so that frames and messages stay cheap to import.
"""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.cluster.backends import DEVICE_BACKENDS, Backend
from outrider.cluster.link.frame import Frame, FrameError, FrameKind, decode, encode
from outrider.cluster.link.wire import Curve, HostWire, LinkError, Wire, WireError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

logger = logging.getLogger(__name__)

VERIFIER_RANK, DRAFTER_RANK = 0, 1

_TOKEN_BYTES = 32
_PORT_BYTES = 2


@dataclass(frozen=True, slots=True)
class LinkInvitation:
    """All a drafter has to know to join one verifier's link. Picklable."""

    epoch: int
    backend: Backend
    host: str
    """The verifier's address."""

    addresses: tuple[str, str]
    """Of the two directions over TCP, the drafter's first."""

    local_addresses: tuple[str, str] | None
    """The same within a machine; None where the drafter is on another one."""

    key: bytes = field(repr=False)
    """The verifier's public key of CURVE. It is made for this link, and whoever does not know it cannot connect."""

    token: bytes = field(repr=False)
    """What the drafter says first."""

    round_deadline_ms: float
    link_deadline_ms: float
    vocab_size: int
    num_speculative_tokens: int
    verifier_id: str
    vocabulary: tuple[str, ...] = ()
    """What the target's token ids mean (vocabulary.Marks); (): not known."""


CompleteLink = Callable[[float], Wire]
"""Call once with a timeout in seconds: waits for the drafter and returns the wire, or raises LinkError."""


def host_link(
    *,
    host: str,
    epoch: int,
    backend: Backend,
    round_deadline_ms: float,
    link_deadline_ms: float,
    vocab_size: int,
    num_speculative_tokens: int,
    verifier_id: str,
    vocabulary: tuple[str, ...] = (),
    device: str | None = None,
) -> tuple[LinkInvitation, CompleteLink]:
    """Listen, and invite one drafter: the verifier's side.

    Drop the returned function, or let it fail, and nobody listens any more. Raises LinkError when `host` cannot be
    bound.

    Args:
        host: the address of this machine that the drafter can reach; loopback when both share a machine. Nothing
            listens on any other interface.
        vocabulary: see LinkInvitation.
        device: of the verifier, for a link of DEVICE_BACKENDS; None: the first.
    """
    address = _resolved(host)
    curve = Curve.new()
    wires = [HostWire("tcp", curve, listens=True, ipv6=":" in address)]
    try:
        addresses = wires[0].bind(address)
    except WireError as error:
        raise LinkError(f"link host {host!r}: cannot listen there: {error}; give an address of this machine") from error
    local_addresses = None
    if ipaddress.ip_address(address).is_loopback:
        local = HostWire("ipc", listens=True)
        try:
            local_addresses = local.bind()
            wires.append(local)
        except WireError as error:
            logger.info("no local sockets, so TCP carries links within this machine: %s", error)
    invitation = LinkInvitation(
        epoch=epoch,
        backend=backend,
        host=address,
        addresses=addresses,
        local_addresses=local_addresses,
        key=curve.public,
        token=secrets.token_bytes(_TOKEN_BYTES),
        round_deadline_ms=round_deadline_ms,
        link_deadline_ms=link_deadline_ms,
        vocab_size=vocab_size,
        num_speculative_tokens=num_speculative_tokens,
        verifier_id=verifier_id,
        vocabulary=vocabulary,
    )

    def complete(timeout_s: float) -> Wire:
        if not wires:
            raise LinkError(f"{_who(invitation)}: this invitation was used up; host a new link")
        listening = wires.copy()
        wires.clear()
        chosen: HostWire | None = None
        try:
            check_device(backend)
            chosen = _await_drafter(listening, invitation, timeout_s)
            return _answered(chosen, invitation, timeout_s, device)
        except LinkError:
            if chosen is not None:
                chosen.end()
            raise
        finally:
            for wire in listening:
                if wire is not chosen:
                    wire.end()

    return invitation, complete


def _await_drafter(wires: list[HostWire], invitation: LinkInvitation, timeout_s: float) -> HostWire:
    """Return the wire on which the drafter has said hello. What anybody else says is ignored."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        wire = HostWire.first_ready(wires, left_s)
        if wire is not None and (said := wire.recv(0.0)) is not None:
            hello = _hello(said, invitation)
            if hello is not None and hmac.compare_digest(hello.payload, invitation.token):
                return wire
            logger.warning("%s: ignored a hello that is not the invited drafter's", _who(invitation))
    raise LinkError(f"{_who(invitation)}: no drafter within {timeout_s:.1f} s")


def _answered(wire: HostWire, invitation: LinkInvitation, timeout_s: float, device: str | None) -> Wire:
    """Answer the drafter's hello. Returns the wire of the link."""
    if not wire.wait_for_reader(timeout_s):
        raise LinkError(f"{_who(invitation)}: the drafter does not read")
    wire.hide()
    if invitation.backend not in DEVICE_BACKENDS:
        wire.send(encode(FrameKind.HELLO, invitation.epoch))
        return wire
    server = open_store(invitation.host)
    # A device's groups keep their store for as long as they live. This one is a client, so that the server can go.
    store = _store_client(invitation.host, server.port, timeout_s)
    wire.send(encode(FrameKind.HELLO, invitation.epoch, server.port.to_bytes(_PORT_BYTES, "little")))
    made = _device_wire(store, VERIFIER_RANK, invitation, timeout_s, device)
    wire.end(linger_s=1.0)
    return made


def join_link(invitation: LinkInvitation, timeout_s: float) -> Wire:
    """Answer an invitation: the drafter's side. Raises LinkError when the verifier does not answer in time."""
    check_device(invitation.backend)
    deadline = time.monotonic() + timeout_s
    local = invitation.local_addresses
    if local is not None and _is_own_socket(local[0].removeprefix("ipc://")):
        wire = HostWire("ipc", listens=False)
        addresses = local
    else:
        wire = HostWire("tcp", Curve.new(server=invitation.key), listens=False, ipv6=":" in invitation.host)
        addresses = invitation.addresses
    try:
        wire.connect(addresses)
        wire.send(encode(FrameKind.HELLO, invitation.epoch, invitation.token))
        said = wire.recv(timeout_s)
        hello = None if said is None else _hello(said, invitation)
        if hello is None:
            raise LinkError(f"none within {timeout_s:.1f} s")
        if invitation.backend not in DEVICE_BACKENDS:
            return wire
        left_s = max(deadline - time.monotonic(), 0.001)
        store = _store_client(invitation.host, int.from_bytes(hello.payload, "little"), left_s)
        made = _device_wire(store, DRAFTER_RANK, invitation, left_s, None)
        wire.end()
        return made
    except LinkError as error:
        wire.end()
        raise LinkError(f"{_who(invitation)}: no answer at {addresses[0]}: {error}") from error


def _hello(data: bytes, invitation: LinkInvitation) -> Frame | None:
    """Return the hello of this link, or None for anything else."""
    try:
        frame = decode(data, invitation.epoch)
    except FrameError:
        return None
    return frame if frame.kind is FrameKind.HELLO else None


def _is_own_socket(path: str) -> bool:
    """Returns whether a socket of this user is there. In another container of the machine it is not."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def check_device(backend: str) -> None:
    """Raise LinkError for a backend that this process cannot have."""
    if (device_type := DEVICE_BACKENDS.get(backend)) is not None:
        from outrider.cluster.link.device_wire import DeviceWire

        DeviceWire.check(backend, device_type)


def _device_wire(
    store: Store, rank: int, invitation: LinkInvitation, connect_timeout_s: float, device: str | None
) -> Wire:
    from outrider.cluster.link.device_wire import DeviceWire

    return DeviceWire(
        store,
        rank,
        backend=invitation.backend,
        device=device or DEVICE_BACKENDS[invitation.backend],
        connect_timeout_s=connect_timeout_s,
    )


def _store_client(host: str, port: int, timeout_s: float) -> TCPStore:
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, None, False, timeout=datetime.timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise LinkError(f"no store at {host}:{port}: {_first_line(error)}") from error


def open_store(host: str, world_size: int | None = None, *, shared: bool = False) -> TCPStore:
    """Open a key-value store on a free port of `host`, an address of this machine, and on no other interface.

    Raises LinkError when `host` cannot be bound.

    Args:
        world_size: None when any number of processes may come.
        shared: whoever opens one on the same port in this process gets this one.
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
            host, port, world_size, True, timeout=datetime.timedelta(seconds=10), wait_for_workers=False,
            multi_tenant=shared, master_listen_fd=listener.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        raise LinkError(f"link host {host!r}: no store on port {port}: {_first_line(error)}") from error


def _resolved(host: str) -> str:
    """Return the address of a host's name. Raises LinkError for one that has none."""
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LinkError(f"link host {host!r}: cannot listen there: {error}; give an address of this machine") from error


def _who(invitation: LinkInvitation) -> str:
    return f"link of {invitation.verifier_id}, epoch {invitation.epoch}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
