"""Checks and picks the TCP ports to serve on."""

from __future__ import annotations

import errno
import random
import socket

from outrider.cluster.config import ConfigError, OutriderConfig

_PICKED_FROM = range(20_000, 32_000)
"""Range above the ports of Ray's workers and below those of outgoing connections (Linux), which may be taken before
Serve listens."""

PORTS = ("grpc_port", "http_port")

_draw = random.SystemRandom()
"""Source without a seed: two processes with one seed would pick the same port."""


def port_is_free(port: int, host: str | None = None) -> bool:
    """Returns whether a server could listen on ``port`` of a host now; None: on all interfaces.

    Raises ConfigError for a host that has no address here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = max(found, key=lambda each: each[0] == socket.AF_INET6)
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"serving: host {host!r} is no address of this machine ({error.strerror})") from None
        return False
    return True


def pick_free_port() -> int:
    """Returns a free port that other programs are unlikely to take."""
    while not port_is_free(port := _draw.choice(_PICKED_FROM)):
        pass
    return port


def settle_ports(config: OutriderConfig) -> OutriderConfig:
    """Returns the configuration with a free port in place of each 0 or unset one. Raises ConfigError for a port in use.

    Serve's own proxy would share a port with another process that allows it; each would get half of the requests.
    """
    serving, gateway = config.serving, config.serving.gateway
    taken: dict[int, str] = {}

    def settled(field: str, port: int | None, host: str) -> int:
        if port and port in taken:
            raise ConfigError(f"serving.{field}: {port} is serving.{taken[port]} too; choose two different ports")
        if port and not port_is_free(port, host):
            option = f"--{field.rpartition('.')[2].replace('_', '-')}"
            fix = f"stop what listens there, or choose another with {option} N ({option} 0 picks a free one)"
            raise ConfigError(f"serving.{field}: port {port} is in use; {fix}")
        while not port or port in taken:
            port = pick_free_port()
        taken[port] = field
        return port

    if gateway != "off":
        names = [*PORTS, *(["admin_port"] if gateway.admin_port is not None else [])]
        public = {name: settled(f"gateway.{name}", getattr(gateway, name), gateway.host) for name in names}
        gateway = gateway.model_copy(update=public)
    asked = {name: getattr(serving, name) for name in PORTS}
    if gateway == "off":  # clients connect to these
        _, asked["http_port"], asked["grpc_port"] = serving.public
    own = {name: settled(name, port, serving.host) for name, port in asked.items()}
    return config.model_copy(update={"serving": serving.model_copy(update={"gateway": gateway, **own})})


def reachable(host: str) -> str:
    """Returns an address on this machine that reaches a server listening on a host."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
