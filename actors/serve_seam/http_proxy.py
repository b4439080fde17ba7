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

from ray.serve._private import constants
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from outrider.actors.serve_seam import leans_on
from outrider.actors.serve_seam.grpc_proxy import limit_server
from outrider.actors.serve_seam.listening import listen_as_configured
from outrider.actors.serve_seam.steady_time import go_by_steady_time
from outrider.actors.serving.access.calls import GuardedHttp, HandOn
from outrider.actors.serving.access.process import proxy_guard
from outrider.actors.serving.access.settings import proxy_access
from outrider.actors.serving.connections import Address, Limit, address_of, sentence
from outrider.actors.serving.failures import RETRY_AFTER_S, leave_out_what_is_told, leave_out_who_left
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
    leans_on.HEADERS.check()
    go_by_steady_time()
    return_memory()
    leave_out_who_left()
    leave_out_what_is_told()
    limit_server(doors().limits)
    auto.AutoHTTPProtocol = TimedProtocol  # uvicorn looks it up when a server starts
    listen_as_configured(proxy_access())
    # The last is the first that a request meets.
    # What pages may do is configured with the other limits: a proxy that was told of none leaves it to the ingress.
    of_pages = [Middleware(CheckBrowsers, limits=doors().limits, in_proxy=True)] if are_told() else []
    return [
        Middleware(HandOn),
        Middleware(DropServesOwn),
        Middleware(ErrorFaces),
        Middleware(HttpDoor),
        *of_pages,
        Middleware(GuardedHttp, failed=refused_by_key, guard=proxy_guard, in_proxy=True),
    ]


class DropServesOwn:
    """ASGI middleware: headers by which whoever stands before Serve steers it (that an answer is made to its end for
    nobody, by when, and where) are no client's to send, and Serve cannot read all that may be in them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [field for field in scope["headers"] if not _is_serves_own(field[0])]
        await self._app(scope, receive, send)


def _is_serves_own(name: bytes) -> bool:
    spelt = _spelt(name.decode("latin-1"))
    return spelt in _SERVES_OWN or spelt.startswith(_OF_SERVES_ROUTER)


def _spelt(name: str) -> str:
    """As Serve compares it."""
    return name.lower().replace("-", "_")


_SERVES_OWN = {
    _spelt(name)
    for name in (
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
    )
}
_OF_SERVES_ROUTER = _spelt(constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX)

MOST_FIELDS = 128
"""Of a header: each takes a hundred bytes and more beside its own."""

MOST_PIPELINED = 4
"""Requests that wait behind one that is being answered, each kept with its header. Whoever sends one more is hung up
on, and may send again what was not answered (RFC 9112, 9.3.2)."""

LINGER_S = 1.0
"""A connection that is refused with words is read for so long, so that they arrive: what is unread resets it."""


class _Refused(Exception):
    """Ends the parsing of what a connection sent. What its client is told is with the connection."""


class TimedProtocol(HttpToolsProtocol):
    """A connection whose client must send a header in time, and not too much of it, nor too many requests before they
    are answered, and read something in time of what waits for it; and which is not one too many. What comes behind a
    body (trailers) is nothing that anybody here asks for, and not kept."""

    _header: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None
    _lingers: asyncio.TimerHandle | None = None
    _address: Address
    _is_refused = False
    _num_header_bytes = 0
    """That have come since the last part of a body, or the last request's end."""

    _num_fields = 0
    _in_header = False

    _answered: RequestResponseCycle | None = None
    """What is being answered. `cycle` is what came last, which may wait behind it."""

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
        most, at = doors().limits.max_header_bytes, 0
        while at < len(data) and not (self._is_refused or self.transport.is_closing()):
            # Never more at once than a header may still have, so that it ends before anything is kept of one too long.
            part = data[at : at + most - self._num_header_bytes]
            at += len(part)
            self._num_header_bytes += len(part)
            super().data_received(part)
            if self._num_header_bytes >= most:
                self._refuse(431, f"the header is longer than {most} bytes (limits.max_header_bytes)")
        if (
            not self._is_refused and self._is_idle() and self.timeout_keep_alive_task is None
        ):  # it was alive, and began something
            self._await_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header, self._num_fields = True, 0
        self._await_header()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_header:
            return
        self._num_fields += 1
        if self._num_fields > MOST_FIELDS:
            self._refuse(431, f"the header has more than {MOST_FIELDS} fields; send fewer")
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header, self._num_header_bytes = False, 0
        self._forget_header()
        if self.parser.should_upgrade() and self._should_upgrade():
            self._refuse(400, "upgrade: no WebSockets are served here; ask without it, answers are streamed over HTTP")
            raise _Refused
        if self.parser.should_upgrade() and self._has_body():  # which the parser takes for the other protocol's
            self._refuse(400, "upgrade: a body cannot be read behind it; ask without it, over HTTP/1.1")
            raise _Refused
        if len(self.pipeline) == MOST_PIPELINED:
            self._hang_up()
            raise _Refused
        super().on_headers_complete()
        if sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # paused where it has to wait: whether the client leaves would not be seen

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """To what did not parse, unless that was to end it. Never into an answer that has begun."""
        if not self._is_refused:
            self._refuse(400, "what was sent is no request of HTTP/1.1; send one, with a path and a body as it says")

    def _refuse(self, status: int, sentence: str) -> None:
        """The connection, with words where no answer has begun. Nothing of it is parsed any more."""
        self._is_refused = True
        self._forget_header()
        self._unset_keepalive_if_required()
        if self.pipeline or (not self._is_idle() and self.cycle.response_started):
            self._hang_up()
            return
        if not self._is_idle():  # it was waiting for the rest, and is not answered twice
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_response(HttpFailure(status, sentence, headers={"connection": "close"})))
        self._lingers = self.loop.call_later(LINGER_S, self.transport.close)

    def _hang_up(self) -> None:
        """On a client to whom what has been answered is sent, and no more: nothing is generated for it while that
        waits for its reader."""
        self._is_refused = True
        self.transport.close()
        self._end_answer()

    def _end_answer(self) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self.flow.resume_writing()  # what waits for room is not written any more
            self._answered.message_event.set()

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
        # uvicorn leaves it where a connection was reset, and with it all that there is of one, for as long as it runs.
        self._unset_keepalive_if_required()
        if self._lingers is not None:
            self._lingers.cancel()
        super().connection_lost(exc)
        self._end_answer()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        if self._header is None and not self.transport.is_closing():
            self._header = self.loop.call_later(doors().limits.receive_timeout_s, self._header_is_late)

    def _header_is_late(self) -> None:
        self._header = None
        if self._is_idle():
            self.transport.abort()

    def _forget_header(self) -> None:
        if self._header is not None:
            self._header.cancel()
            self._header = None

    def _forget_reader(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """app for a client of HTTP/1.0, which knows no chunks, where uvicorn sends them: the body ends with the
    connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))  # of this part, which is all of it
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _too_many_connections(limit: Limit) -> bytes:
    headers = {"Retry-After": str(RETRY_AFTER_S), "connection": "close"}
    return _response(HttpFailure(503, sentence(limit), headers=headers))


def _response(failure: HttpFailure) -> bytes:
    """As it is sent where no application answers."""
    answer = failure.response()
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
    return STATUS_LINE[answer.status_code] + fields + b"\r\n" + bytes(answer.body)
