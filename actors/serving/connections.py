"""How many connections each port of a proxy has, whose they are, and which are too many.

Only HTTP connections tell when they are made, and over TLS not before their handshake is done; gRPC's tell nothing but
their address, with each call. What all of them have is a socket of this process. So a port's connections are looked up
there, twice a second, and those beyond the bounds are hung up on, the newest first (Watch). Whatever is known sooner is
asked at once (Connections.admit): an HTTP connection when it is made, a gRPC connection with its first call, so that
none that is too many has anything begun for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from ray.util import metrics

from outrider.cluster.limits import LimitsConfig

LOOK_EVERY_S = 0.5

Address = tuple[str, int]
"""Of a connection's other end."""

Limit = Literal["max_connections", "max_connections_per_peer"]

_SOCKETS = Path("/proc/self/fd")

logger = logging.getLogger("ray.serve.outrider.proxy")


class Connections:
    """Of one port. Pure."""

    def __init__(self, api: str, limits: LimitsConfig, on_refused: Callable[[str, Limit], object]) -> None:
        """on_refused: called with api and limit, once for each connection."""
        self._api, self._most, self._most_per_peer = api, limits.max_connections, limits.most_connections_per_peer
        self._on_refused = on_refused
        self.are_watched = False
        """Whether anybody says so when one is gone that does not do so itself."""

        self._open: dict[Address, str] = {}
        """With whom each counts for."""

        self._peers: Counter[str] = Counter()
        self._refused: set[Address] = set()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, address: Address) -> Limit | None:
        """None: it may stay, and counts from now on. Else what it is too many for; it is to be hung up on."""
        if address in self._open:
            return None
        peer = peer_of(address)
        limit: Limit
        if len(self._open) >= self._most:
            limit = "max_connections"
        elif self._peers[peer] >= self._most_per_peer:
            limit = "max_connections_per_peer"
        else:
            self._open[address] = peer
            self._peers[peer] += 1
            self._refused.discard(address)
            return None
        if address not in self._refused:
            self._refused.add(address)
            self._on_refused(self._api, limit)
        return limit

    def leave(self, address: Address) -> None:
        """It is gone. Of one that was not admitted this says nothing."""
        self._refused.discard(address)
        peer = self._open.pop(address, None)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def present(self, there: Collection[Address]) -> list[Address]:
        """there: all that there are. Returns those to hang up on."""
        for gone in [address for address in (*self._open, *self._refused) if address not in there]:
            self.leave(gone)
        return [address for address in there if self.admit(address) is not None]


def address_of(host: str, port: int) -> Address:
    """One spelling, whoever tells it: no zone behind an address, no IPv4 in IPv6."""
    host = host.partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, port


def peer_of(address: Address) -> str:
    """Whom a connection counts for: its address, of IPv6 the network of 64 bits that one site has to itself."""
    try:
        ip = ip_address(address[0])
    except ValueError:
        return address[0]
    return str(IPv6Network((ip, 64), strict=False)) if isinstance(ip, IPv6Address) else str(ip)


def address_of_call(peer: str) -> Address | None:
    """peer: as gRPC names it, ``ipv4:127.0.0.1:40000`` or ``ipv6:%5B::1%5D:40000``. None for what is neither."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return address_of(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def peer_of_call(peer: str) -> str:
    """Whom a gRPC call counts for, by the same rule as its connection."""
    address = address_of_call(peer)
    return peer if address is None else peer_of(address)


def sentence(limit: Limit) -> str:
    """For a client."""
    if limit == "max_connections":
        return "there are too many connections; retry later (limits.max_connections)"
    return (
        "there are too many connections from this address; close some, or retry later (limits.max_connections_per_peer)"
    )


def warn_of_few_files(limits: LimitsConfig, files: int) -> None:
    """files: how many this process may have open, sockets among them. Beyond that nobody is let in, nor told why."""
    needed = 3 * limits.max_connections  # gRPC's server takes twice as many for a moment
    if files < needed:
        logger.warning(
            "limits.max_connections: %d on each port may need %d open files, and this process may have %d; lower it to "
            "%d, or raise 'ulimit -n' before Ray starts",
            limits.max_connections,
            needed,
            files,
            files // 3,
        )


class Watch:
    """Looks a process's connections up, and hangs up on those that are too many. For one event loop."""

    def __init__(self, connections: Mapping[str, Connections], on_look: Callable[[str, int], object]) -> None:
        """connections: by API. on_look: told how many each has."""
        self._connections, self._on_look = connections, on_look
        self._apis: dict[int, str] = {}
        self._known: dict[str, tuple[int, Address] | None] = {}
        """By the socket's name: its port and its other end; None: it is no connection to us."""

        self._next: asyncio.TimerHandle | None = None

    def add(self, api: str, port: int) -> None:
        """On the event loop, before or after the server starts."""
        if not _SOCKETS.is_dir():
            logger.warning("connections that say nothing, and all of gRPC, are not counted: there is no %s", _SOCKETS)
            return
        self._apis[port] = api
        self._connections[api].are_watched = True
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_on)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _look_on(self) -> None:
        self._next = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_on)
        try:
            self.look()
        except OSError:
            logger.exception("connections could not be counted")

    def look(self) -> None:
        there: dict[str, dict[Address, int]] = {api: {} for api in self._apis.values()}
        known = {}
        for fd in os.listdir(_SOCKETS):
            try:
                name = os.readlink(_SOCKETS / fd)
            except OSError:
                continue
            if name.startswith("socket:"):
                known[name] = found = self._known[name] if name in self._known else self._of(int(fd))
                if found is not None:
                    there[self._apis[found[0]]][found[1]] = int(fd)
        self._known = known
        for api, addresses in there.items():
            for address in self._connections[api].present(addresses):
                hang_up(addresses[address], address)
            self._on_look(api, len(self._connections[api]))

    def _of(self, fd: int) -> tuple[int, Address] | None:
        with suppress(OSError), _borrowed(fd) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and (port := own.getsockname()[1]) in self._apis:
                return port, _other_end(own)
        return None


def hang_up(fd: int, address: Address) -> None:
    """On whoever is at the other end of it, if that is still address. The server sees its end, and closes it."""
    with suppress(OSError), _borrowed(fd) as own:
        if _other_end(own) == address:
            own.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket of somebody else's, who may close theirs meanwhile. Raises OSError."""
    with socket.socket(fileno=os.dup(fd)) as own:
        yield own


def _other_end(own: socket.socket) -> Address:
    """Raises OSError for one that is not connected, as one that listens."""
    host, port = own.getpeername()[:2]
    return address_of(host, port)


def connections_of(limits: LimitsConfig) -> dict[str, Connections]:
    """By API, counted in Ray's metrics."""
    return {api: Connections(api, limits, _count_refusal) for api in ("grpc", "http")}


@functools.cache
def _refusals() -> metrics.Counter:
    description = "Connections that a proxy hung up on because there were too many, by the limit they were over."
    return metrics.Counter("outrider_proxy_connections_refused", description, ("api", "limit"))


def _count_refusal(api: str, limit: Limit) -> None:
    _refusals().inc(tags={"api": api, "limit": limit})


@functools.cache
def _open_now() -> metrics.Gauge:
    return metrics.Gauge("outrider_proxy_connections", "Connections that a proxy has now.", ("api",))


def tell_open(api: str, count: int) -> None:
    """In Ray's metrics."""
    _open_now().set(count, tags={"api": api})
