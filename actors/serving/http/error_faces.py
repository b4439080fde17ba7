"""What a client is told by HTTP where Serve itself fails."""

from __future__ import annotations

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.serving.failures import failure_of, made_by_serve, usable_request_id
from outrider.actors.serving.openai.door import REQUEST_ID_HEADER
from outrider.actors.serving.openai.errors import HttpFailure

_SERVES_OWN = {
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


class ErrorFaces:
    """ASGI middleware of a proxy: what Serve answers itself when an ingress is lost, which is nothing at all or Ray's
    own words, becomes 503 (429 for its full queues) in the form that clients know, and what fails there 500. What the
    ingress answers is JSON, or a page, and passes."""

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

        failed: Exception | None = None
        try:
            await self._app(scope, receive, pass_on)
        except Exception as error:
            if started:
                raise
            failed = error
        if not started:
            sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            request_id = usable_request_id(sent.get(REQUEST_ID_HEADER, ""))
            if failed is None:
                failure = made_by_serve(code, words.decode("utf-8", "replace"), request_id)
            else:
                failure = failure_of(failed, f"request {request_id}", request_id)
            assert failure is not None
            response = HttpFailure.of_call(failure).response()
            response.headers[REQUEST_ID_HEADER] = request_id
            await response(scope, receive, send)
