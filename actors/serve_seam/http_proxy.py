"""Limits on Serve's proxies that can only be set before their servers start: what happens to an HTTP request before it
reaches the ingress (actors/serving/http/door.py), how long a connection may take, and what the gRPC server takes in.

Serve takes it from its environment, on every node that runs a proxy:
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=outrider.actors.serve_seam.http_proxy.middlewares``, as `outrider
serve` sets it for the cluster that it starts, with ``OUTRIDER_LIMITS`` beside it. Without it, sizes are checked after
they have been taken in, and refusals are as many, and later.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.middleware import Middleware
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.actors.serve_seam import leans_on
from outrider.actors.serve_seam.grpc_proxy import limit_server
from outrider.actors.serve_seam.listening import listen_as_configured
from outrider.actors.serving.access.calls import GuardedHttp, HandOn
from outrider.actors.serving.access.process import proxy_guard
from outrider.actors.serving.access.settings import proxy_access
from outrider.actors.serving.connections import Address, Limit, address_of, sentence
from outrider.actors.serving.failures import RETRY_AFTER_S
from outrider.actors.serving.gate import doors
from outrider.actors.serving.heap import return_memory
from outrider.actors.serving.http.browsers import CheckBrowsers
from outrider.actors.serving.http.door import HttpDoor
from outrider.actors.serving.http.error_faces import ErrorFaces
from outrider.actors.serving.openai.errors import HttpFailure, refused_by_key
from outrider.cluster.limits import are_told


def middlewares() -> list[Middleware]:
    """For Serve's proxies, which ask for them before they start their servers."""
    leans_on.HTTP_PROXY.check()
    return_memory()
    limit_server(doors().limits)
    auto.AutoHTTPProtocol = TimedProtocol  # uvicorn looks it up when a server starts
    listen_as_configured(proxy_access())
    # The last is the first that a request meets.
    # What pages may do is configured with the other limits: a proxy that was told of none leaves it to the ingress.
    of_pages = [Middleware(CheckBrowsers, limits=doors().limits, in_proxy=True)] if are_told() else []
    return [
        Middleware(HandOn),
        Middleware(ErrorFaces),
        Middleware(HttpDoor),
        *of_pages,
        Middleware(GuardedHttp, failed=refused_by_key, guard=proxy_guard, in_proxy=True),
    ]


MOST_HEADER_BYTES = 64 << 10
"""What of a header has come without its end. The parser itself would go on for as long as it comes."""


class TimedProtocol(HttpToolsProtocol):
    """A connection whose client must send a header in time, and of some length, and read something in time of what
    waits for it; and which is not one too many."""

    _header_bytes = 0
    _header: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None
    _address: Address

    def connection_made(self, transport: Any) -> None:
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._address = address_of(host, port)
        limit = doors().connections["http"].admit(self._address)
        if limit is not None:
            transport.write(_too_many_connections(limit))
            transport.close()
            return
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # refused above
            return
        super().data_received(data)
        if self._is_idle() and self.timeout_keep_alive_task is None:  # it was alive, and began something
            self._await_header()
        if self._header is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES and not self.transport.is_closing():
                self.transport.write(_HEADER_TOO_LONG)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_header()

    def on_headers_complete(self) -> None:
        self._forget_header()
        self._header_bytes = 0
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        timeout_s = doors().limits.unread_timeout_s
        # Not close(), which would wait for the reader.
        self._reader = self._reader or self.loop.call_later(timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        doors().connections["http"].leave(self._address)
        if self.transport is None:
            return
        self._forget_header()
        self._forget_reader()
        super().connection_lost(exc)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        if self._header is None and not self.transport.is_closing():
            self._header = self.loop.call_later(doors().limits.receive_timeout_s, self._header_is_late)

    def _header_is_late(self) -> None:
        self._header = None
        if self._is_idle() and self.transport.get_protocol() is self:  # and not a WebSocket's by now
            self.transport.abort()

    def _forget_header(self) -> None:
        if self._header is not None:
            self._header.cancel()
            self._header = None

    def _forget_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


def _too_many_connections(limit: Limit) -> bytes:
    return _answer("503 Service Unavailable", sentence(limit), {"Retry-After": str(RETRY_AFTER_S)})


def _answer(status: str, message: str, headers: dict[str, str]) -> bytes:
    """Before any application is there to give one. The connection is to be closed after it."""
    failure = HttpFailure(int(status[:3]), message, headers={**headers, "connection": "close"})
    answer = failure.response()
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
    return f"HTTP/1.1 {status}\r\n".encode() + fields + b"\r\n" + bytes(answer.body)


_HEADER_TOO_LONG = _answer(
    "431 Request Header Fields Too Large", f"the header is longer than {MOST_HEADER_BYTES} bytes", {}
)
