"""HTTP requests under a span of the ingress: what is behind finds it in the headers, as if the client had sent it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.observability.tracing import TRACE_HEADERS, ingress_span, process_tracer


class TraceRequests:
    """ASGI middleware. Traces POST requests: the others are pages, probes and scrapes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or process_tracer("ingress") is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with ingress_span(f"POST {scope['path']}"[:128], headers, api="http") as span:
            others = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in TRACE_HEADERS]
            ours = [(name.encode(), value.encode()) for name, value in span.headers.items()]

            async def note_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(http_status=message["status"])
                await send(message)

            scope["headers"] = [*others, *ours]
            await self._app(scope, receive, note_status)
