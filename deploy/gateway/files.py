"""Renders HAProxy's configuration, certificates and map of keys from ``serving.gateway``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from string import Template

from outrider.cluster.config import GatewayConfig
from outrider.cluster.config_section import ConfigError
from outrider.deploy.keys import load_keys, read_private_file

FIELD = "serving.gateway"
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

_NEVER = 253402300800
"""First second of the year 10000."""

_CLIENT_TIMEOUT_S = 60.0
"""Longest TLS handshake, and longest time that a client reads nothing of a response that waits for it."""


def contents(config: GatewayConfig) -> dict[str, bytes]:
    """Returns the content of each file that HAProxy reads, by name. Raises ConfigError."""
    found: dict[str, bytes] = {}
    if (tls := config.tls) is not None:
        certificate = _read(f"{FIELD}.tls.certificate", tls.certificate)
        key = read_private_file(f"{FIELD}.tls.key", Path(tls.key))
        found["server.pem"] = _without_blank_lines(certificate + b"\n" + key)
        if tls.client_ca is not None:
            certificates = CERTIFICATE.findall(_read(f"{FIELD}.tls.client_ca", tls.client_ca))
            found["clients.pem"] = b"\n".join(map(_without_blank_lines, certificates))
    if config.keys_file is not None:
        found["keys.map"] = render_keys(Path(config.keys_file)).encode()
    return found


def render(config: GatewayConfig, directory: Path, backends: dict[str, str]) -> str:
    """Returns HAProxy's configuration. directory: of its socket, certificates and map of keys."""
    tls = ""
    if config.tls is not None:
        tls = f"ssl crt {directory}/server.pem"
        if config.tls.client_ca is not None:
            tls += f" ca-file {directory}/clients.pem verify required"
    both = " v4v6" if config.host == "::" else ""
    return Template((Path(__file__).parent / "haproxy.cfg").read_text()).substitute(
        backends,
        directory=directory,
        threads=min(4, len(os.sched_getaffinity(0))),
        header_timeout_ms=round(config.header_timeout_s * 1000),
        idle_timeout_ms=round(config.idle_timeout_s * 1000),
        client_timeout_ms=round(min(config.idle_timeout_s, _CLIENT_TIMEOUT_S) * 1000),
        connections=config.max_connections_per_address,
        max_body_bytes=config.max_body_bytes,
        requests_per_minute=config.requests_per_minute or 0,
        keys="on" if config.keys_file is not None else "off",
        admin="on" if config.admin_port is not None else "off",
        http_bind=f"{config.host}:{config.http_port}{both}",
        grpc_bind=f"{config.host}:{config.grpc_port}{both}",
        admin_bind=f"{config.host}:{config.admin_port}{both}",
        http_tls=f"{tls} alpn h2,http/1.1" if tls else "",
        grpc_tls=f"{tls} alpn h2" if tls else "proto h2",
    )


def render_keys(path: Path) -> str:
    """A line a key: its hash in capitals, as HAProxy's ``hex`` writes it, expiry in seconds, requests a minute."""
    lines = []
    for key in load_keys(f"{FIELD}.keys_file", path):
        expires = _NEVER if key.expires is None else int(key.expires.timestamp())
        lines.append(f"{key.hash.removeprefix('sha256:').upper()} {expires}:{key.requests_per_minute or ''}\n")
    return "".join(lines)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror}); name a file that can") from None


def _without_blank_lines(pem: bytes) -> bytes:
    """Removes blank lines, since an empty line ends a command of the stats socket."""
    return b"\n".join(line for line in pem.splitlines() if line.strip()) + b"\n"
