"""What happens to an HTTP request in Serve's proxy before it reaches the ingress.

Serve passes a request on with its first bytes and its body as it comes: whoever sends half a body would hold a place,
and a body without end would be passed on for as long as it comes. Here a body is read first, up to a size and within a
time; then there is room for the request, or a turn, or it is refused (outrider.actors.serving.gate). A body that says
nothing, of a probe or a GET, is not waited for, and kept no more than one of a request for status may be long.

``outrider.actors.serve_seam.http_proxy`` mounts this on Serve's proxies. Connections, which know of no request yet, are
that one's matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_checks import check_request_id
from outrider.actors.serving.access.calls import headers_before_body
from outrider.actors.serving.access.guard import caller_at, key_of_caller, need_of_http
from outrider.actors.serving.connections import address_of, peer_of
from outrider.actors.serving.gate import (
    CAPACITY_METADATA,
    REFUSED,
    Arrival,
    Doors,
    Gate,
    Gates,
    NotAwaited,
    RequestLate,
    doors,
)
from outrider.actors.serving.lanes import Lane, LaneFull
from outrider.actors.serving.openai.door import REQUEST_ID_HEADER
from outrider.actors.serving.openai.errors import HttpError, HttpFailure, queue_full, refused
from outrider.actors.serving.ways_out import PROXY, this_process

SHORT_BYTES = 1 << 16
"""Of a body that asks for neither an answer nor tokens: of the name of an adapter, for example."""


@dataclass(frozen=True)
class _Turns:
    """For requests beside generations. most_bytes: of their body; 0: it says nothing; None: as much as a
    generation's."""

    lane: Callable[[Doors], Lane]
    most_bytes: int | None = SHORT_BYTES


_HEALTH = _Turns(lambda doors: doors.health, 0)
_TOKENIZE = _Turns(lambda doors: doors.tokenize, None)
_STATUS = _Turns(lambda doors: doors.status)
_TURNS = {
    "/health": _HEALTH,
    "/ping": _HEALTH,
    "/livez": _HEALTH,
    "/readyz": _HEALTH,
    "/-/healthz": _HEALTH,
    "/detokenize": _TOKENIZE,
    "/tokenize": _TOKENIZE,
    "/outrider/v1/token_texts": _TOKENIZE,
}
"""By the ends of their paths; whatever is not named is a request for status or a page."""

_WITH_BODIES = ("POST", "PUT", "PATCH")
_CLOSED = {"connection": "close"}

_READ_ON, _READ_ON_S = 4, 2.0
"""So many times max_request_bytes, and for so long, is a body read that is refused."""


class HttpDoor:
    """ASGI middleware of a proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gates = Gates("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        here = doors()  # nothing but the header of the request has been read up to here
        path: str = scope["path"]
        generates = scope["method"] == "POST" and need_of_http("POST", path, behind_prefix=True).generates
        turns = next((turns for end, turns in _TURNS.items() if path.endswith(end)), _STATUS)
        most = here.limits.max_request_bytes
        if not generates and turns.most_bytes is not None:
            most = min(most, turns.most_bytes)
        try:
            _check_request_ids(scope, refuse=generates)
            body = b""
            if most and scope["method"] in _WITH_BODIES:
                body = await _received(scope, receive, here, most)
            num_bytes = len(body)
            receive = _once(body, receive)
            del body  # which the ingress will have, and nobody here
            application = here.routes.by_path(path)
            gate = None if application is None else self._gates.of(application)
            admitted = self._admitted(scope, gate) if generates and gate else self._in_turn(scope, turns, num_bytes)
            async with admitted:

                async def learn_and_send(message: Message) -> None:
                    if gate is not None and message["type"] == "http.response.start":
                        for name, value in message.get("headers", ()):
                            if name == CAPACITY_METADATA.encode():
                                gate.learn(value)
                    await send(message)

                await self._app(scope, receive, learn_and_send)
        except _Left:
            return
        except HttpError as error:
            await error.failure.response()(scope, receive, send)

    @asynccontextmanager
    async def _admitted(self, scope: Scope, gate: Gate) -> AsyncIterator[None]:
        """Room for a generation. Raises HttpError."""
        key = key_of_caller()
        if not gate.enter(key):
            self._gates.count_refusal()
            raise HttpError(queue_full(for_the_key=not gate.is_full))
        if untold := gate.untold():
            scope[REFUSED] = untold
        scope[PROXY] = this_process()
        try:
            yield
        finally:
            gate.leave(key)

    @asynccontextmanager
    async def _in_turn(self, scope: Scope, turns: _Turns, num_bytes: int) -> AsyncIterator[None]:
        """A turn for any other request, whose body has so many bytes. Raises HttpError."""
        lane, peer = turns.lane(doors()), _peer(scope)
        try:
            await lane.take(peer, num_bytes)
        except LaneFull as full:
            self._gates.count_refusal()
            raise HttpError(HttpFailure(429, str(full), headers={"Retry-After": "1"})) from None
        try:
            yield
        finally:
            lane.leave(peer)


class _Left(Exception):
    """The client has, before its request was in."""


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return peer_of(address_of(str(client[0]), 0)) if client else ""


def _check_request_ids(scope: Scope, *, refuse: bool) -> None:
    """As the ingress does, before Serve reads them, which takes UTF-8 alone. refuse False: one that is none, such as a
    gateway may send with a probe, is left out. Raises HttpError."""
    try:
        for name, value in scope["headers"]:
            if name == REQUEST_ID_HEADER.encode():
                check_request_id(value.decode("latin-1"))
    except RequestError as error:
        if refuse:
            raise HttpError(replace(refused(error), headers=headers_before_body(scope))) from None
        scope["headers"] = [field for field in scope["headers"] if field[0] != REQUEST_ID_HEADER.encode()]


async def _received(scope: Scope, receive: Receive, here: Doors, most: int) -> bytes:
    """The body, of so many bytes at most. Raises HttpError for one that is too long or does not come, _Left."""
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and (length := int(announced[:20])) > most:
        if length <= _READ_ON * most:
            await _read_on(receive, length)
        raise _too_large(most, here)
    body, arrival = bytearray(), Arrival(here, caller_at(_peer(scope)))

    async def read() -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            body.extend(message.get("body", b""))
            if len(body) > most:
                body.clear()
                await _read_on(receive, (_READ_ON - 1) * most)
                raise _too_large(most, here)
            arrival.grew(len(body))
            more = message.get("more_body", False)

    reading = asyncio.ensure_future(read())
    try:
        await arrival.wait_for(reading)
    except RequestLate:
        message = f"the body did not come within {here.limits.receive_timeout_s:g} s (limits.receive_timeout_s)"
        raise HttpError(HttpFailure(408, message, headers=_CLOSED)) from None
    except NotAwaited:
        message = "too many requests wait for their bodies to come; send it at once"
        raise HttpError(HttpFailure(429, message, headers={"Retry-After": "1", **_CLOSED})) from None
    reading.result()
    return bytes(body)


async def _read_on(receive: Receive, most: int) -> None:
    """What comes of a body that is refused, for a moment: who is hung up on while it sends does not read why."""
    num_bytes, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(_READ_ON_S):
            while more and num_bytes < most:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


def _too_large(most: int, here: Doors) -> HttpError:
    why = " (limits.max_request_bytes)" if most == here.limits.max_request_bytes else ", the most for this path"
    return HttpError(HttpFailure(413, f"the body is longer than {most} bytes{why}", headers=_CLOSED))


def _once(body: bytes, receive: Receive) -> Receive:
    """The body first, and that this was it; then what the client does, which can only be to leave. Whoever asks again
    has let go of the body: Serve's proxy keeps the last message that it got for as long as the request is answered."""
    begins = [body]
    del body
    given = False

    async def replay() -> Message:
        nonlocal given
        if begins:
            return {"type": "http.request", "body": begins.pop(), "more_body": True}
        if not given:
            given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass  # a body that says nothing
        return message

    return replay
