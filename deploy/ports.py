"""TCP ports to serve on: taken, free, or to be picked."""

from __future__ import annotations

import random
import socket

from outrider.cluster.config import ConfigError, OutriderConfig

_PICKED_FROM = range(20_000, 32_000)
"""Above the ports of Ray's workers, below those that Linux gives to whoever does not ask for one, among them every
outgoing connection: one of these may be gone by the time that Serve listens."""

_TRIES = 100

_draw = random.SystemRandom()
"""Whose seed nobody sets: two processes of one seed would pick the same port."""


def port_is_free(port: int, host: str | None = None, *, lingering: bool = True) -> bool:
    """Whether a server could listen on ``port`` now. host None: on all interfaces. lingering: closed connections may
    linger on it, as most servers allow (by SO_REUSEADDR)."""
    family, address = (socket.AF_INET6, "::") if host is None and socket.has_ipv6 else (socket.AF_INET, host or "")
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(lingering))
            listener.bind((address, port))
            listener.listen(1)
    except OSError:
        return False
    return True


def pick_free_port() -> int:
    """One that nobody else is likely to take before it is served on. Raises ConfigError when all that it tried are in
    use."""
    for port in _draw.sample(_PICKED_FROM, _TRIES):
        if port_is_free(port, lingering=False):
            return port
    raise ConfigError(f"serving: {_TRIES} ports from {_PICKED_FROM[0]} on are in use; name ports that are free")


def _pick_another(taken: set[int | None]) -> int:
    while (port := pick_free_port()) in taken:
        pass
    return port


def settle_ports(config: OutriderConfig) -> OutriderConfig:
    """The configuration with port 0 replaced by a free one.

    Raises ConfigError for a port in use. Without this check Serve's proxy would share the port with another one that
    allows it, and each would get half of the other's requests.
    """
    serving = config.serving
    if serving.admin_port is not None:
        if not port_is_free(serving.admin_port, serving.admin_host):
            raise ConfigError(
                f"serving.admin_port: port {serving.admin_port} of {serving.admin_host} is in use, or no address of "
                "this machine; choose another, or set serving.admin_host"
            )
        if serving.admin_port in (serving.grpc_port, serving.http_port):
            raise ConfigError(f"serving.admin_port: {serving.admin_port} is grpc_port or http_port too; choose another")
    for key in ("grpc_port", "http_port"):
        port = getattr(serving, key)
        if port and not port_is_free(port, serving.host):
            option = f"--{key.replace('_', '-')}"
            raise ConfigError(
                f"serving.{key}: port {port} is in use; stop what listens there, or choose another with {option} N "
                f"({option} 0 picks a free one)"
            )
    if serving.grpc_port and serving.grpc_port == serving.http_port:
        raise ConfigError(
            f"serving.http_port: {serving.http_port} is serving.grpc_port too; choose two different ports"
        )
    taken = {serving.admin_port}
    grpc_port = serving.grpc_port or _pick_another(taken)
    http_port = serving.http_port or _pick_another(taken | {grpc_port})
    return config.model_copy(
        update={"serving": serving.model_copy(update={"grpc_port": grpc_port, "http_port": http_port})}
    )


def reachable(host: str) -> str:
    """An address on this machine that reaches a server listening on ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
