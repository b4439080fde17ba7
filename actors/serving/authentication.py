"""Authenticates callers and numbers them.

The gateway checks keys and names the caller in a header. Without a gateway the source address identifies the caller.
The shared key ``serving.api_key`` is checked here, with the gateway or without.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from outrider.actors.serving.failures import Refused

TOKEN_VARIABLE = "OUTRIDER_GATEWAY_TOKEN"
"""Environment variable with the secret that the gateway adds to each request."""

TOKEN_HEADER, OWNER_HEADER, GRPC_TIMEOUT_HEADER = "x-outrider-gateway", "x-outrider-owner", "x-outrider-timeout"
"""Headers and gRPC metadata that only the gateway may set. The last one is a copy of ``grpc-timeout``."""

OWNER_IN_SCOPE = "outrider.owner"
"""Key of an ASGI scope: the number of the caller, once it has been checked."""

_NO_KEY = "invalid API key; send it as 'Authorization: Bearer KEY'"


@dataclass(frozen=True)
class Authenticator:
    """Checks the key and the gateway's token of a request, and identifies its caller.

    api_key: the key that every caller must send; None: none. token: sent by the gateway; None: there is no gateway.
    """

    api_key: str | None = None
    token: str | None = None

    def owner_of(self, header: Callable[[str], str | None], address: str) -> int:
        """Returns the caller's number, at least 1.

        header: looks a header up by its name in lower case. address: of the peer.

        Raises Refused without the gateway's token, and without the key.
        """
        if self.token is not None and not _equal(header(TOKEN_HEADER), self.token):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "this port answers the gateway only; use its address")
        if self.api_key is not None:
            scheme, _, sent = (header("authorization") or "").partition(" ")
            # Anthropic's clients send the key by a header of its own.
            if not _equal(sent.strip() if scheme.lower() == "bearer" else header("x-api-key"), self.api_key):
                raise Refused(grpc.StatusCode.UNAUTHENTICATED, _NO_KEY)
        named = header(OWNER_HEADER) if self.token is not None else None
        digest = hashlib.sha256((named or address).encode("utf-8", "surrogateescape")).digest()
        return (int.from_bytes(digest[:8], "big") >> 1) or 1


def tenant_salt(tenant: int, asked: str | None) -> str:
    """Returns the salt under which a tenant's prompts share cached blocks. asked: the client's own salt."""
    return hashlib.sha256(f"{tenant}\0{asked or ''}".encode("utf-8", "surrogatepass")).hexdigest()


def _equal(sent: str | None, expected: str) -> bool:
    return sent is not None and hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), expected.encode())
