"""What Serve's HTTP proxies do about a full queue before a request reaches the ingress; see actors/serving/gate.py.

Serve takes it from its environment, on every node that runs a proxy:
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=outrider.actors.serve_seam.http_proxy.middlewares``, as `outrider
serve` sets it for the cluster that it starts. Without it refusals are as many, and later.
"""

from __future__ import annotations

import grpc
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.serving.failures import made_by_serve, usable_request_id
from outrider.actors.serving.gate import CAPACITY_METADATA, Gates
from outrider.actors.serving.openai.door import REQUEST_ID_HEADER
from outrider.actors.serving.openai.errors import HttpFailure, queue_full

GENERATIONS = ("/v1/completions", "/v1/chat/completions", "/outrider/v1/stream")
"""Ends of paths whose requests take a place."""

_SERVES_OWN = {
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}

_ASKED_OFTEN = ("/health", "/metrics", "/v1/models", "/outrider/v1/status")
"""Ends of others whose answers tell how much room there is."""


def middlewares() -> list[Middleware]:
    """For Serve's proxies."""
    return [Middleware(ErrorFaces), Middleware(ProxyGate)]


class ErrorFaces:
    """ASGI middleware of a proxy: what Serve answers itself when an ingress is lost, which is nothing at all or Ray's
    own words, becomes 503 (429 for its full queues) in the form that clients know. What the ingress answers is JSON, or
    a page, and passes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path", "").startswith("/-/"):
            await self._app(scope, receive, send)
            return
        started, code = False, grpc.StatusCode.INTERNAL
        words = b""

        async def pass_on(message: Message) -> None:
            nonlocal started, code, words
            if message["type"] == "http.response.start":
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                if message["status"] in _SERVES_OWN and kind.startswith(b"text/plain"):
                    code = _SERVES_OWN[message["status"]]
                    return
                started = True
            if started:
                await send(message)
            else:
                words += message.get("body", b"")

        await self._app(scope, receive, pass_on)
        if not started:
            sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            request_id = usable_request_id(sent.get(REQUEST_ID_HEADER, ""))
            failure = made_by_serve(code, words.decode("utf-8", "replace"), request_id)
            assert failure is not None
            response = HttpFailure.of_call(failure).response()
            response.headers[REQUEST_ID_HEADER] = request_id
            await response(scope, receive, send)


class ProxyGate:
    """ASGI middleware of a proxy. Applications are told apart by what comes before their paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gates = Gates("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        end = next((end for end in (*GENERATIONS, *_ASKED_OFTEN) if path.endswith(end)), None)
        if scope["type"] != "http" or end is None:
            await self._app(scope, receive, send)
            return
        gate = self._gates.of(path.removesuffix(end))
        takes_a_place = end in GENERATIONS and scope["method"] == "POST"
        if takes_a_place and not gate.enter():
            self._gates.count_refusal()
            await queue_full().response()(scope, receive, send)
            return

        async def learn_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                for name, value in message.get("headers", ()):
                    if name == CAPACITY_METADATA.encode():
                        gate.learn(value)
            await send(message)

        try:
            await self._app(scope, receive, learn_and_send)
        finally:
            if takes_a_place:
                gate.leave()
