"""How the two ends of a link find each other.

The verifier hosts a key-value store and hands out an invitation, which travels over Ray. The drafter joins with it.
Both sign in at the store first, each waiting for the other only so long; then the transport connects.
torch is imported only when a link is really made, so that frames and messages stay cheap to import.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outrider.cluster.link.link import LinkError, Transport

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

VERIFIER_RANK, DRAFTER_RANK = 0, 1
_SIGN_IN = {VERIFIER_RANK: "verifier", DRAFTER_RANK: "drafter"}


@dataclass(frozen=True, slots=True)
class LinkInvitation:
    """All a drafter has to know to join one verifier's link. Picklable."""

    epoch: int
    backend: Literal["gloo", "nccl"]
    store_host: str
    store_port: int
    capacity_words: int
    """Length of a whole frame, header included, in both directions."""

    round_deadline_ms: float
    link_deadline_ms: float
    vocab_size: int
    num_speculative_tokens: int
    verifier_id: str


CompleteLink = Callable[[float], Transport]
"""Call once with a timeout in seconds: waits for the drafter and returns the transport, or raises LinkError."""


def host_link(
    *,
    host: str,
    epoch: int,
    backend: Literal["gloo", "nccl"],
    capacity_words: int,
    round_deadline_ms: float,
    link_deadline_ms: float,
    vocab_size: int,
    num_speculative_tokens: int,
    verifier_id: str,
    device: str | None = None,
) -> tuple[LinkInvitation, CompleteLink]:
    """Verifier's side: open a store on a free port of `host` and invite one drafter.

    host: the address of this machine that the drafter can reach; loopback when both share a machine. Nothing
    listens on any other interface.
    device: the CUDA device of an nccl link.
    Drop the returned function, or let it fail, and the store is gone. Raises LinkError when `host` cannot be bound.
    """
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
    )

    def complete(timeout_s: float) -> Transport:
        if not store:
            raise LinkError(f"link of {verifier_id}, epoch {epoch}: this invitation was used up; host a new link")
        return _connect(store.pop(), VERIFIER_RANK, invitation, host, timeout_s, device)

    return invitation, complete


def join_link(invitation: LinkInvitation, timeout_s: float, device: str | None = None) -> Transport:
    """Drafter's side: answer an invitation. Raises LinkError when the verifier is not there in time."""
    from torch.distributed import TCPStore

    host, port = invitation.store_host, invitation.store_port
    deadline = time.monotonic() + timeout_s
    try:
        # Tells in one line what TCPStore tells in three stack traces, and which of our addresses reaches the peer.
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            local_host = probe.getsockname()[0]
        remaining = _seconds(max(deadline - time.monotonic(), 0.001))
        store = TCPStore(host, port, None, False, timeout=remaining, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise LinkError(f"{_who(invitation)}: no answer at {host}:{port}: {_first_line(error)}") from error
    return _connect(store, DRAFTER_RANK, invitation, local_host, deadline - time.monotonic(), device)


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
    store: Store, rank: int, invitation: LinkInvitation, local_host: str, timeout_s: float, device: str | None
) -> Transport:
    from torch.distributed import PrefixStore

    peer = _SIGN_IN[1 - rank]
    deadline = time.monotonic() + timeout_s
    store = PrefixStore(f"link/{invitation.epoch}", store)
    try:
        store.set(_SIGN_IN[rank], local_host)
        store.wait([peer], _seconds(max(timeout_s, 0.001)))
    except RuntimeError as error:
        raise LinkError(f"{_who(invitation)}: no {peer} within {timeout_s:.1f} s: {_first_line(error)}") from error
    connect_timeout_s = max(deadline - time.monotonic(), 0.001)
    send_timeout_s = invitation.link_deadline_ms / 1000
    if invitation.backend == "gloo":
        from outrider.cluster.link.transport import GlooTransport

        return GlooTransport(
            store, rank, local_host=local_host, connect_timeout_s=connect_timeout_s, send_timeout_s=send_timeout_s
        )
    if invitation.backend == "nccl":
        from outrider.cluster.link.transport import NcclTransport

        return NcclTransport(
            store,
            rank,
            device=device or "cuda",
            capacity_words=invitation.capacity_words,
            connect_timeout_s=connect_timeout_s,
            send_timeout_s=send_timeout_s,
        )
    raise LinkError(f"{_who(invitation)}: backend {invitation.backend!r} is neither gloo nor nccl")


def _who(invitation: LinkInvitation) -> str:
    return f"link of {invitation.verifier_id}, epoch {invitation.epoch}"


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
