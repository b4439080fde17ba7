"""How the two ends of a link find each other.

The verifier listens, and Ray carries the address to the drafter, so whoever holds it was invited by this application.
A host's wire is complete once both of its directions have connected. Where a device's memory is moved, the ends meet
at a store of torch.distributed's.

torch is imported only for a device's link, so that frames and messages stay cheap to import.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from outrider.cluster.backends import DEVICE_BACKENDS, Backend
from outrider.cluster.link.wire import HostWire, LinkError, Wire, WireError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

VERIFIER_RANK, DRAFTER_RANK = 0, 1
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Holds where the drafter of one link connects. Picklable."""

    backend: Backend
    endpoints: tuple[str, str]
    """ZeroMQ's endpoints for the two directions, or host and port of the store at which a device's groups meet."""

    key: bytes = field(default=b"", repr=False)
    """The verifier's public key of CURVE, over TCP. It is made for this link, and whoever does not know it cannot
    connect."""


@dataclass(frozen=True, slots=True)
class LinkInvitation:
    """Holds all that a drafter has to know to join one verifier's link. Picklable."""

    address: LinkAddress
    epoch: int
    link_deadline_ms: float
    vocab_size: int
    num_speculative_tokens: int
    verifier_id: str
    vocabulary: tuple[str, ...] = ()
    """What the target's token ids mean (vocabulary.Marks); (): not known."""


CompleteLink = Callable[[float], Wire]
"""Call once with a timeout in seconds: waits for the drafter and returns the wire, or raises LinkError."""


def host_link(host: str | None, backend: Backend, device: str | None = None) -> tuple[LinkAddress, CompleteLink]:
    """Listen for one drafter: the verifier's side.

    Drop the returned function, or let it fail, and nobody listens any more. Raises LinkError when `host` cannot be
    bound.

    Args:
        host: the address of this machine that the drafter can reach; None: the drafter is on this machine. Nothing
            listens on any other interface.
        device: of the verifier, for a link of DEVICE_BACKENDS; None: the first.
    """
    if backend in DEVICE_BACKENDS:
        store = open_store(host or LOOPBACK)
        address = LinkAddress(backend, (host or LOOPBACK, str(store.port)))
        return address, partial(_device_wire, address, VERIFIER_RANK, device, store)
    try:
        wire = HostWire.listen(host)
    except WireError as error:
        if host is not None:
            raise
        logger.info("no local sockets, so TCP carries links within this machine: %s", error)
        wire = HostWire.listen(LOOPBACK)
    return LinkAddress(backend, wire.addresses, wire.key), partial(_accept, wire)


def _accept(wire: HostWire, timeout_s: float) -> Wire:
    try:
        wire.connected(timeout_s)
    except WireError as error:
        raise LinkError(f"no drafter: {error}") from None
    wire.hide()
    return wire


def join_link(address: LinkAddress, timeout_s: float) -> Wire:
    """Connect to a verifier: the drafter's side. Raises LinkError."""
    try:
        if address.backend in DEVICE_BACKENDS:
            check_device(address.backend)
            return _device_wire(address, DRAFTER_RANK, None, None, timeout_s)
        return HostWire.connect(address.endpoints, address.key, timeout_s)
    except LinkError as error:
        raise LinkError(f"no verifier at {':'.join(address.endpoints)}: {error}") from error


def check_device(backend: str) -> None:
    """Raise LinkError for a backend that this process cannot have."""
    if (device_type := DEVICE_BACKENDS.get(backend)) is not None:
        from outrider.cluster.link.device_wire import DeviceWire

        DeviceWire.check(backend, device_type)


def _device_wire(
    address: LinkAddress, rank: int, device: str | None, server: TCPStore | None, timeout_s: float
) -> Wire:
    """Connect both ends' groups at their store. server: kept until they have met.

    A device's groups keep their store for as long as they live. Each end's is a client, so that the server can go.
    """
    from torch.distributed import TCPStore

    from outrider.cluster.link.device_wire import DeviceWire

    host, port = address.endpoints
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise LinkError(f"no store: {_first_line(error)}") from error
    device = device or DEVICE_BACKENDS[address.backend]
    return DeviceWire(store, rank, backend=address.backend, device=device, connect_timeout_s=timeout_s)


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
        raise LinkError(f"cannot listen at {host!r}: {error}; give an address of this machine") from error
    port = listener.getsockname()[1]
    try:
        # TCPStore left to itself listens on every interface.
        return TCPStore(
            host, port, world_size, True, timeout=datetime.timedelta(seconds=10), wait_for_workers=False,
            multi_tenant=shared, master_listen_fd=listener.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        raise LinkError(f"no store at {host}:{port}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
