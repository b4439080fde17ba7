"""What keeps other people's web pages from using this server through the browsers of those who may.

A page of another origin may send requests here, and a page whose name is made to resolve to this machine (DNS
rebinding) may read the answers too. A browser tells both: by ``Host``, the name that it was given, and by ``Origin``,
the page that asks. That a body is JSON only when it says so (actors/serving/http/body.py) belongs to it: other types
are sent without asking the server first.
"""

from __future__ import annotations

import ipaddress
from fnmatch import fnmatchcase

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.actors.serving.openai.errors import HttpFailure
from outrider.cluster.limits import LimitsConfig

_RESERVED = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Ends of names that nobody can register: RFC 6761, 6762, 8375, and ICANN's for private use. Kubernetes' are among
them."""


class CheckBrowsers:
    """ASGI middleware of the ingress."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app, self._hosts, self._origins = app, limits.allowed_hosts, limits.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (failure := self._refusal(scope)) is not None:
            await failure.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpFailure | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._is_ours(host):
            message = f"host {host[:100]!r} is no name of this server; call it by address, or add it to"
            return HttpFailure(421, f"{message} limits.allowed_hosts", "host")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            message = f"pages of origin {origin[:100]!r} may not send requests here; add it to limits.allowed_origins"
            return HttpFailure(403, message, "origin")
        return None

    def _is_ours(self, host: str) -> bool:
        """host: as in the header, with or without a port. A client that sends none is no browser."""
        name = _name(host)
        if "." not in name or name.endswith(_RESERVED) or _is_address(name):
            return True
        return any(fnmatchcase(name, pattern.lower()) for pattern in self._hosts)


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower().rstrip(".") if host.count(":") == 1 else host.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
