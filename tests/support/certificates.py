"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Signed:
    """PEM."""

    certificate: bytes
    private_key: bytes

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Paths of certificate and key. One over the other as they are renewed: the key is in place first."""
        paths = directory / f"{name}.pem", directory / f"{name}.key"
        for path, data in ((paths[1], self.private_key), (paths[0], self.certificate)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.chmod(0o600)
            fresh.replace(path)
        return paths


class Authority:
    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._certificate = self._sign(self._name, self._key, is_authority=True)
        self.certificate = self._certificate.public_bytes(Encoding.PEM)

    def sign(self, name: str = "localhost", valid: timedelta = timedelta(days=1)) -> Signed:
        """Sign a certificate for localhost and 127.0.0.1. valid: negative for one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name), key, valid=valid)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Signed(certificate.public_bytes(Encoding.PEM), pem)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        is_authority: bool = False,
        valid: timedelta = timedelta(days=1),
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(days=2),
            not_valid_after=now + valid,
        ).add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
