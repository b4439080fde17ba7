"""What happens to an HTTP request in Serve's proxy before it reaches the ingress.

Serve passes a request on with its first bytes and its body as it comes: whoever sends half a body would hold a place,
and a body without end would be passed on for as long as it comes. Here a body is read first, up to a size and within a
time; then there is room for the request, or a turn, or it is refused (outrider.actors.serving.gate).

``outrider.actors.serve_seam.http_proxy`` mounts this on Serve's proxies. Connections, which know of no request yet, are
that one's matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.serving.access.guard import key_of_caller
from outrider.actors.serving.gate import (
    CAPACITY_METADATA,
    REFUSED,
    Arrival,
    Doors,
    Gate,
    Gates,
    Lane,
    LaneFull,
    NotAwaited,
    RequestLate,
    doors,
)
from outrider.actors.serving.openai.errors import HttpError, HttpFailure, queue_full
from outrider.actors.serving.ways_out import PROXY, this_process

GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/outrider/v1/stream")
"""Ends of paths whose requests take a place."""

_LANES: dict[str, Callable[[Doors], Lane]] = {
    "/health": lambda doors: doors.health,
    "/ping": lambda doors: doors.health,
    "/detokenize": lambda doors: doors.tokenize,
    "/tokenize": lambda doors: doors.tokenize,
    "/outrider/v1/token_texts": lambda doors: doors.tokenize,
    "/metrics": lambda doors: doors.status,
    "/v1/models": lambda doors: doors.status,
    "/outrider/v1/status": lambda doors: doors.status,
}
"""Ends of other paths, whose requests have turns; whatever is not named is a request for status or a page."""

_ENDS = (*GENERATIONS, *_LANES)
_WITH_BODIES = ("POST", "PUT", "PATCH")
_CLOSED = {"connection": "close"}

_READ_ON, _READ_ON_S = 4, 2.0
"""So many times max_request_bytes, and for so long, is a body read that is refused."""


class HttpDoor:
    """ASGI middleware of a proxy. Applications are told apart by what comes before their paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gates = Gates("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        here = doors()  # nothing but the header of the request has been read up to here
        try:
            body = await _received(scope, receive, here) if scope["method"] in _WITH_BODIES else None
            async with self._admitted(scope, here) as gate:

                async def learn_and_send(message: Message) -> None:
                    if gate is not None and message["type"] == "http.response.start":
                        for name, value in message.get("headers", ()):
                            if name == CAPACITY_METADATA.encode():
                                gate.learn(value)
                    await send(message)

                await self._app(scope, receive if body is None else _once(body, receive), learn_and_send)
        except _Left:
            return
        except HttpError as refused:
            await refused.failure.response()(scope, receive, send)

    @asynccontextmanager
    async def _admitted(self, scope: Scope, here: Doors) -> AsyncIterator[Gate | None]:
        """Room for a generation, a turn for any other request; the gate of its application, where the path tells that.
        Raises HttpError."""
        path: str = scope["path"]
        end = next((end for end in _ENDS if path.endswith(end)), "")
        gate = self._gates.of(path.removesuffix(end)) if end else None
        if gate is not None and end in GENERATIONS and scope["method"] == "POST":
            key = key_of_caller()
            if not gate.enter(key):
                self._gates.count_refusal()
                raise HttpError(queue_full(for_the_key=not gate.is_full))
            if refused := gate.untold():
                scope[REFUSED] = refused
            scope[PROXY] = this_process()
            try:
                yield gate
            finally:
                gate.leave(key)
            return
        lane = _LANES.get(end, lambda doors: doors.status)(here)
        client = scope.get("client")
        try:
            await lane.take(str(client[0]) if client else "")
        except LaneFull as full:
            self._gates.count_refusal()
            raise HttpError(HttpFailure(429, str(full), headers={"Retry-After": "1"})) from None
        try:
            yield gate
        finally:
            lane.leave()


class _Left(Exception):
    """The client has, before its request was in."""


async def _received(scope: Scope, receive: Receive, here: Doors) -> bytes:
    """The body. Raises HttpError for one that is too long or does not come, _Left."""
    most = here.limits.max_request_bytes
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if announced.isdigit() and (length := int(announced[:20])) > most:
        if length <= _READ_ON * most:
            await _read_on(receive, length)
        raise _too_large(most)
    body, arrival = bytearray(), Arrival(here)

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
                raise _too_large(most)
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


def _too_large(most: int) -> HttpError:
    return HttpError(
        HttpFailure(413, f"the body is longer than {most} bytes (limits.max_request_bytes)", headers=_CLOSED)
    )


def _once(body: bytes, receive: Receive) -> Receive:
    """The body first; then what the client does, which can only be to leave."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
