"""Where Serve's proxies listen, and in which language: ``serving.host`` and TLS on the gRPC and HTTP ports themselves.
And whom: its own services stand behind the same door as ours, and both ports' connections are counted.

Serve's gRPC proxy binds every interface and knows plain text only, and its HTTP proxy reads certificates once, asks
clients for none, and waits a minute for a handshake. Both look up what their server is made with when they start it,
which is after they have asked for middlewares (http_proxy.py): there ours is put in its place.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn
from ray.serve._private import default_impl, http_util

from outrider.actors.serve_seam import leans_on
from outrider.actors.serve_seam.grpc_proxy import mount_serves_own
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.process import stale_gauge
from outrider.actors.serving.access.settings import ProxyAccess
from outrider.actors.serving.access.tls import Certificates, grpc_credentials, rotate
from outrider.actors.serving.connections import Watch, tell_open, warn_of_few_files
from outrider.actors.serving.gate import doors
from outrider.cluster.config import ConfigError


def listen_as_configured(access: ProxyAccess | None) -> Watch:
    """Before a proxy starts its servers. access None: where Serve has them listen, in plain text. Returns what counts
    their connections, once they listen. Raises ConfigError for certificates that cannot be used."""
    leans_on.LISTENING.check()
    certificates = None
    if access is not None and access.ssl_certfile is not None:
        certificates = access.certificates(stale_gauge("certificate"))
    limits = doors().limits
    warn_of_few_files(limits, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    watch = Watch(doors().connections, tell_open)

    def add_grpc_address(server: Any, address: str) -> None:
        """address: Serve's, every interface and the port."""
        mount_serves_own(server)
        port = int(address.rpartition(":")[2])
        bind_grpc(server, "::" if access is None else access.host, port, certificates)
        watch.add("grpc", port)

    class Config(uvicorn.Config):
        """Of the HTTP server."""

        def __init__(self, *args: Any, **options: Any) -> None:
            # uvicorn takes loopback's word for who a client is: whoever is on this machine would choose an address,
            # and with it who pays for what is refused.
            options["proxy_headers"] = "FORWARDED_ALLOW_IPS" in os.environ
            super().__init__(*args, **options)
            if certificates is not None and not self.is_ssl:
                raise ConfigError(
                    "serving.ssl_certfile: Serve's HTTP options have no ssl_certfile; give the same there"
                )

        def load(self) -> None:
            super().load()
            watch.add("http", self.port)
            if certificates is not None and self.ssl is not None:
                rotate(self.ssl, certificates)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """uvicorn has no option for this: a client that never begins its handshake is kept for a minute."""
            loop = asyncio.get_running_loop()
            if self.config.is_ssl:
                loop.create_server = partial(  # type: ignore[method-assign]
                    loop.create_server, ssl_handshake_timeout=limits.receive_timeout_s
                )
            try:
                await super().startup(sockets)
            finally:
                vars(loop).pop("create_server", None)

    default_impl.add_grpc_address = add_grpc_address
    # Ray brings the proxy's class with the names of its module as they were: a function replaced there is not found.
    http_util.uvicorn = SimpleNamespace(Config=Config, Server=Server)
    return watch


def bind_grpc(server: Any, host: str, port: int, certificates: Reloading[Certificates] | None) -> int:
    """The port of a grpc.aio server, and no other: who speaks plain text to a port with TLS is not understood. Returns
    its number. Raises ConfigError for an address that cannot be had."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if certificates is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, grpc_credentials(certificates)))
    except RuntimeError as error:
        raise ConfigError(f"serving.host, serving.grpc_port: cannot listen on {address}: {error}") from None
