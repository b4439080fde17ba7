"""Flags of every command that calls a running server: TLS, and the key, which is never a flag, since command lines can
be read by everybody on the machine."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.deploy.client.sync_client import API_KEY_VARIABLE


@dataclass(frozen=True)
class Tls:
    """PEM. ca None: the authorities that the system believes. certificate, private_key: the client's own."""

    ca: bytes | None
    certificate: bytes | None
    private_key: bytes | None
    paths: tuple[Path | None, Path | None, Path | None]

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.private_key, self.certificate)

    def context(self) -> ssl.SSLContext:
        ca, certificate, key = self.paths
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        return context


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"connection (a key is taken from ${API_KEY_VARIABLE})")
    group.add_argument("--tls", action="store_true", help="speak TLS; implied by the next three")
    group.add_argument("--ca", metavar="FILE", type=Path, help="believe the authorities in it (PEM)")
    group.add_argument("--client-cert", metavar="FILE", type=Path, help="show this certificate (PEM)")
    group.add_argument("--client-key", metavar="FILE", type=Path, help="its private key (PEM)")


def tls_of(args: argparse.Namespace) -> Tls | None:
    """None: plain text. Raises ValueError naming the flag."""
    if (args.client_cert is None) != (args.client_key is None):
        raise ValueError("--client-cert and --client-key belong together; give both, or neither")
    if not (args.tls or args.ca or args.client_cert):
        return None
    paths = args.ca, args.client_cert, args.client_key
    flags = ("--ca", "--client-cert", "--client-key")
    ca, certificate, key = (_read(flag, path) for flag, path in zip(flags, paths, strict=True))
    tls = Tls(ca, certificate, key, paths)
    try:
        tls.context()
    except ssl.SSLError as error:
        raise ValueError(f"{', '.join(f for f, p in zip(flags, paths, strict=True) if p)}: {error.reason}") from None
    return tls


def _read(flag: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ValueError(f"{flag}: cannot read {path}: {error.strerror}") from None
