"""The guard in front of calls: in a proxy before a message or a body is read, in the ingress before all else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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

ProxiedCall = Callable[[AsyncIterator[Any], Any], Coroutine[Any, Any, Any]]
StreamingCall = Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]


def guarded_rpc(method: str, call: ProxiedCall, guard: Guard | None) -> ProxiedCall:
    """In a proxy. method: ``/package.Service/Name``. guard None: no key is asked for."""
    if guard is None:
        return call
    need = need_of_rpc(method)

    async def guarded(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
        try:
            with guard.admit(Asked("grpc", method, _shown_key(context), context.peer(), need)):
                return await call(requests, context)
        except Refused as refused:
            _refuse(context, refused)
            return b""

    return guarded


def guarded_stream(method: str, call: StreamingCall, guard: Guard) -> StreamingCall:
    """Likewise, of a call that is a generator."""
    need = need_of_rpc(method)

    async def guarded(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            with guard.admit(Asked("grpc", method, _shown_key(context), context.peer(), need)):
                async for message in call(requests, context):
                    yield message
        except Refused as refused:
            _refuse(context, refused)

    return guarded


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
        need = need_of_http(path, behind_prefix=self._in_proxy)
        try:
            with guard.admit(Asked("http", path, shown.decode("latin-1"), peer, need)):
                await self._app(scope, receive, send)
        except Refused as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            headers = http_headers(refused)
            if self._in_proxy and scope["method"] not in ("GET", "HEAD"):
                headers["connection"] = "close"  # with what there is of a body that nobody will read
            await self._failed(refused, headers)(scope, receive, send)
