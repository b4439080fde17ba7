"""``serving.gateway``: HAProxy in front of Serve's HTTP and gRPC proxies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from outrider.cluster.config_section import Section

FilePath = Annotated[str, Field(min_length=1), AfterValidator(lambda path: str(Path(path).expanduser().absolute()))]
"""Of a file that another process reads, whose working directory may be another."""


class GatewayTls(Section):
    """TLS of the gateway's listeners. Files are read again when they change."""

    certificate: FilePath
    """Certificate (PEM), with its chain."""

    key: FilePath
    """Private key (PEM, without a passphrase) of the certificate."""

    client_ca: FilePath | None = None
    """Authorities (PEM) of which clients must show a certificate. None: clients need none."""


class GatewayConfig(Section):
    """HAProxy in front of Serve's HTTP and gRPC proxies ([gateway.md](gateway.md))."""

    host: str = Field("127.0.0.1", pattern=r"^[A-Za-z0-9_.:-]+$")
    """Address on which the gateway listens. ``0.0.0.0`` or ``::``: every interface."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Port of OpenAI's API and the page. 0: any free one."""

    grpc_port: int = Field(9000, ge=0, le=65535)
    """Port of the gRPC API. 0: any free one."""

    tls: GatewayTls | None = None
    """Certificate, key and client authorities of every listener. None: plain text."""

    keys_file: FilePath | None = None
    """File of API keys' hashes, as ``outrider keys new`` writes it. Every call but health probes then needs a key.
    None: no key is needed."""

    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    """Most requests a minute of one API key, or of one address where there are no keys. A key's own
    ``requests_per_minute`` goes before. Health, status and aborts do not count. None: no limit."""

    max_connections_per_address: int = Field(200, ge=1, le=1_000_000)
    """Most connections from one address to all listeners together. Of IPv6 a network of 64 bits counts as one
    address."""

    max_body_bytes: int = Field(8 * 2**20, ge=1024, le=2**31 - 1)
    """Longest HTTP request body, and longest gRPC message. Longer ones get 413 or RESOURCE_EXHAUSTED; bodies without a
    Content-Length get 411."""

    header_timeout_s: float = Field(10.0, gt=0, le=3600)
    """Within how many seconds the headers of a request, and the first 32 KiB of its body, must arrive."""

    idle_timeout_s: float = Field(300.0, gt=0, le=86_400)
    """After how many seconds a connection without a request is closed. After 60 s, or this where it is less, ends one
    whose TLS handshake is not done, or whose client reads nothing of what waits for it. A client that waits for an
    answer is not idle."""

    admin_port: int | None = Field(None, ge=0, le=65535)
    """Port of ``/metrics``, ``/outrider/v1/status``, and HAProxy's own ``/haproxy/metrics`` and ``/stats``, which
    ``http_port`` has not then. None: the first two are on ``http_port``, the others nowhere. 0: any free one."""

    @model_validator(mode="after")
    def _distinct_ports(self) -> GatewayConfig:
        fields: dict[int, str] = {}
        for field in ("http_port", "grpc_port", "admin_port"):
            port = getattr(self, field)
            if port and (other := fields.setdefault(port, field)) != field:
                raise ValueError(f"{field}: is {port}, as is {other}; choose another port")
        return self
