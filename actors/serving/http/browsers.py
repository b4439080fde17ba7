"""What keeps other people's web pages from using this server through the browsers of those who may.

A page of another origin may send requests here, and a page whose name is made to resolve to this machine (DNS
rebinding) may read the answers too. A browser tells both: by ``Host``, the name that it was given, and by ``Origin``,
the page that asks. That a body is JSON only when it says so (actors/serving/http/body.py) belongs to it: other types
are sent without asking the server first.

Proxies that know the limits look before a body is read, and the ingress once more, which others may come to as well.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from fnmatch import fnmatchcase

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.actors.serving.access.calls import headers_before_body
from outrider.actors.serving.http.body import refused_envelope
from outrider.actors.serving.openai.errors import HttpFailure
from outrider.cluster.limits import LimitsConfig

_RESERVED = (".localhost", ".local", ".internal", ".home.arpa", ".test")
"""Ends of names that nobody can register: RFC 6761, 6762, 8375, and ICANN's for private use. Kubernetes' are among
them."""


TAKE_JSON = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/outrider/v1/stream",
    "/outrider/v1/token_texts",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
)
"""Ends of paths. What is sent there is JSON, or refused."""

SERVES_PROBE = "/-/healthz"
"""Answered by Serve's proxy itself, whatever it is called by."""

_LOOKED_AT = (b"host", b"origin", b"content-type", b"content-encoding")


class CheckBrowsers:
    """ASGI middleware, of a proxy or the ingress. in_proxy: something may stand before the paths, and no body has been
    read."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig, in_proxy: bool = False) -> None:
        self._app, self._hosts, self._origins = app, limits.allowed_hosts, limits.allowed_origins
        self._in_proxy = in_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or (failure := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
            return
        if self._in_proxy and scope["type"] == "http":
            failure = replace(failure, headers={**failure.headers, **headers_before_body(scope)})
        await failure.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpFailure | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _LOOKED_AT}
        if self._in_proxy and scope["path"] == SERVES_PROBE:
            return None
        failure = self._of_page(headers.get(b"host", ""), headers.get(b"origin"))
        if failure is None and self._in_proxy and scope.get("method") == "POST" and scope["path"].endswith(TAKE_JSON):
            return refused_envelope(headers.get(b"content-type", ""), headers.get(b"content-encoding", "identity"))
        return failure

    def _of_page(self, host: str, origin: str | None) -> HttpFailure | None:
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
