"""Certificates of the gRPC and HTTP ports: checked at the start, and taken anew, for new connections, when their files
change. Clients must show a certificate where ``serving.ssl_ca_certs`` says whose are believed.

gRPC asks for the certificates before each handshake. Python's ssl does so by the callback that is meant for choosing
among several servers' names, which is called for clients that name none, too: it moves the connection to a context of
the newest files, so that certificate, key and authorities change together.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from outrider.actors.serving.access.files import Reloading, read_file
from outrider.cluster.config_section import ConfigError

CERTIFICATE, PRIVATE_KEY, CLIENT_CA = "serving.ssl_certfile", "serving.ssl_keyfile", "serving.ssl_ca_certs"


@dataclass(frozen=True)
class Certificates:
    """PEM, checked. client_ca None: clients need no certificate."""

    chain: bytes
    private_key: bytes
    client_ca: bytes | None
    expires: datetime


def load_certificates(
    certfile: str,
    keyfile: str,
    ca_certs: str | None = None,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Certificates:
    """Raises ConfigError naming the field and the fix: for files that cannot be read or are not what they should be, an
    expired certificate, a key of another certificate, a key that others may read."""
    chain, private_key = read_file(CERTIFICATE, certfile), read_file(PRIVATE_KEY, keyfile, private=True)
    server = _certificates(CERTIFICATE, certfile, chain)[0]
    _check_times(CERTIFICATE, certfile, server, now())
    try:
        key = load_pem_private_key(private_key, password=None)
    except TypeError:
        fix = "write it without one: openssl pkey -in KEY -out PLAIN"
        raise ConfigError(f"{PRIVATE_KEY}: {keyfile} needs a passphrase; {fix}") from None
    except ValueError:
        raise ConfigError(f"{PRIVATE_KEY}: {keyfile} is no private key in PEM; give the certificate's own") from None
    if _public(key.public_key()) != _public(server.public_key()):
        raise ConfigError(
            f"{PRIVATE_KEY}: {keyfile} does not belong to the certificate in {certfile} (serving.ssl_certfile); "
            "give the two that were made together"
        )
    client_ca = None
    if ca_certs is not None:
        client_ca = read_file(CLIENT_CA, ca_certs)
        for authority in _certificates(CLIENT_CA, ca_certs, client_ca):
            _check_times(CLIENT_CA, ca_certs, authority, now())
    found = Certificates(chain, private_key, client_ca, server.not_valid_after_utc)
    try:
        server_context(found)  # whatever else OpenSSL may have against them
    except ssl.SSLError as error:
        raise ConfigError(f"{CERTIFICATE}: {certfile} cannot be used ({error.reason}); make a new one") from None
    return found


def reloading_certificates(
    certfile: str,
    keyfile: str,
    ca_certs: str | None = None,
    on_look: Callable[[Reloading[Certificates]], object] = lambda files: None,
) -> Reloading[Certificates]:
    """on_look: see Reloading. Raises ConfigError."""
    paths = [path for path in (certfile, keyfile, ca_certs) if path is not None]
    return Reloading(paths, lambda: load_certificates(certfile, keyfile, ca_certs), on_look=on_look)


def grpc_credentials(certificates: Reloading[Certificates]) -> grpc.ServerCredentials:
    """For ``add_secure_port``."""
    used, first = certificates.versioned()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls it from threads of its own; None: nothing is new."""
        nonlocal used
        version, found = certificates.versioned()
        if version == used:
            return None
        used = version
        return _grpc_configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(first), newer, require_client_authentication=first.client_ca is not None
    )


def rotate(context: ssl.SSLContext, certificates: Reloading[Certificates]) -> None:
    """Make a server's context ask for certificates as configured, and hand its new connections over to a context of the
    files as they are then."""
    used, first = certificates.versioned()
    newest = server_context(first)
    _harden(context, first)

    def hand_over(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, asked: ssl.SSLContext) -> None:
        nonlocal used, newest
        version, found = certificates.versioned()
        if version != used:
            used, newest = version, server_context(found)
        connection.context = newest

    context.sni_callback = hand_over


def server_context(certificates: Certificates) -> ssl.SSLContext:
    """Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # OpenSSL takes files. This one is memory of this process, and what was checked is what is used.
    file = os.memfd_create("outrider-certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(certificates.private_key + b"\n" + certificates.chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    _harden(context, certificates)
    return context


def _harden(context: ssl.SSLContext, certificates: Certificates) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificates.client_ca is not None:
        context.load_verify_locations(cadata=certificates.client_ca.decode("ascii"))
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session shows no certificate: one whose authority is no longer believed would go on.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET


def _grpc_configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(found.private_key, found.chain)], root_certificates=found.client_ca
    )


def _certificates(field: str, path: str, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise ConfigError(f"{field}: {path} holds no certificate in PEM; give one, or a chain of them") from None


def _check_times(field: str, path: str, certificate: x509.Certificate, now: datetime) -> None:
    if now >= (end := certificate.not_valid_after_utc):
        raise ConfigError(f"{field}: the certificate in {path} expired at {end.isoformat()}; renew it")
    if now < (begin := certificate.not_valid_before_utc):
        raise ConfigError(
            f"{field}: the certificate in {path} is valid from {begin.isoformat()} only; wait, or set this clock right"
        )


def _public(key: object) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded
