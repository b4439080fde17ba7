"""The guard in front of calls: in a proxy before a message or a body is read, in the ingress before all else. And in a
proxy behind them, to charge for those that end by their caller's fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.serving.access.budget import BILL, Bill, hand_on
from outrider.actors.serving.access.guard import (
    Asked,
    Guard,
    Refused,
    http_headers,
    need_of_http,
    need_of_rpc,
)
from outrider.actors.serving.access.process import ingress_guard

AUTHORIZATION = "authorization"

WITH_BODIES = ("POST", "PUT", "PATCH")
"""HTTP methods. What comes with another one is not read."""

_AWAITED_IN_VAIN = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How a proxy ends a call whose message it has awaited for long enough."""

SMALL_BODY = 1 << 16
"""In bytes. A connection on which no more is to come of a body that nobody reads may stay: a new one, with a TLS
handshake, would cost more."""

ProxiedCall = Callable[[AsyncIterator[Any], Any], Coroutine[Any, Any, Any]]


def guarded_rpc(method: str, call: ProxiedCall, guard: Guard | None, *, comes_whole: bool = True) -> ProxiedCall:
    """In a proxy. method: ``/package.Service/Name``. guard None: nothing is asked for. comes_whole: its request is
    there when it is called; else call reads it, and BILL is told of it."""
    if guard is None:
        return call
    need = need_of_rpc(method)

    async def guarded(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        bill = Bill(is_whole=comes_whole)
        asked = Asked("grpc", method, _shown_key(context), context.peer(), need)
        try:
            with guard.admit(asked, bill), _charging(guard, bill, context):
                return await call(requests, context)
        except Refused as refused:
            _refuse(context, refused)
            return b""

    return guarded


@contextmanager
def _charging(guard: Guard, bill: Bill, context: grpc.aio.ServicerContext) -> Iterator[None]:
    """Around a call in a task of its own, as every gRPC call has."""
    BILL.set(bill)
    try:
        yield
    finally:
        bill.answered()
        if not bill.is_whole and context.code() not in _AWAITED_IN_VAIN:
            bill.broken_off()
        if bill.is_fault_over_grpc(context.code()):
            guard.charge(bill)


def _refuse(context: grpc.aio.ServicerContext, refused: Refused) -> None:
    failure = refused.failure()
    context.set_code(failure.code)
    context.set_details(failure.message)
    context.set_trailing_metadata(tuple(failure.trailing_metadata()))


@contextmanager
def let_in(grpc_context: Any, rpc: str) -> Iterator[None]:
    """In the ingress, around a call from a proxy. Raises Refused."""
    guard = ingress_guard()
    if guard is None:
        yield
        return
    with guard.admit(Asked("grpc", rpc, _shown_key(grpc_context), grpc_context.peer() or "", need_of_rpc(rpc))):
        yield


def _shown_key(context: Any) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == AUTHORIZATION:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


class GuardedHttp:
    """ASGI middleware, of a proxy or the ingress.

    failed: a response of a refusal's, as this API tells failures. guard: asked for with each request. in_proxy:
    something may stand before the paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        failed: Callable[[Refused, dict[str, str]], JSONResponse],
        guard: Callable[[], Guard | None],
        in_proxy: bool,
    ) -> None:
        self._app, self._failed, self._guard, self._in_proxy = app, failed, guard, in_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = self._guard()
        if guard is None or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope.get("path", "")
        if not self._in_proxy:
            path = path.removeprefix(scope.get("root_path", "")) or "/"
        shown = next((value for name, value in scope["headers"] if name == AUTHORIZATION.encode()), b"")
        peer = ":".join(map(str, scope.get("client") or ()))
        need = need_of_http(scope.get("method", ""), path, behind_prefix=self._in_proxy)
        bill = Bill(is_whole=scope.get("method") not in WITH_BODIES)
        try:
            with guard.admit(Asked("http", path, shown.decode("latin-1"), peer, need), bill):
                if guard.charges and scope["type"] == "http":
                    await self._charged(guard, bill, scope, receive, send)
                else:
                    await self._app(scope, receive, send)
        except Refused as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            headers = http_headers(refused)
            if self._in_proxy:
                headers |= headers_before_body(scope)
            await self._failed(refused, headers)(scope, receive, send)

    async def _charged(self, guard: Guard, bill: Bill, scope: Scope, receive: Receive, send: Send) -> None:
        status: int | None = None

        async def weigh() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                bill.received(len(message.get("body", b"")), is_whole=not message.get("more_body", False))
            return message

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                bill.answered()
            await send(message)

        before = BILL.set(bill)
        try:
            await self._app(scope, weigh, note_status)
        finally:
            BILL.reset(before)
            if bill.is_fault_over_http(status):
                guard.charge(bill)


def headers_before_body(scope: Scope) -> dict[str, str]:
    """Of a response that is given before the request's body has been read: the connection is closed, unless little of
    one was announced."""
    if scope["method"] in ("GET", "HEAD"):
        return {}
    announced = dict(scope["headers"]).get(b"content-length", b"")
    return {} if announced.isdigit() and int(announced[:20]) <= SMALL_BODY else {"connection": "close"}


class HandOn:
    """ASGI middleware of a proxy, the last before Serve: what waited for its turn up to here is charged to nobody."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hand_on()
        await self._app(scope, receive, send)
