"""ASGI middleware of the ingress: counts HTTP requests and traces them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.observability.metrics import CANCELLED, METRICS, IngressMetrics
from outrider.actors.observability.tracing import TRACE_HEADERS, ingress_span, process_tracer


class CountRequests:
    """ASGI middleware that counts each request when its response has ended, by path and status."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics = METRICS) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, complete = 0, False

        async def note_status(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        with self._metrics.in_flight("http"):
            failed = False
            try:
                await self._app(scope, receive, note_status)
            except Exception:
                failed = True
                raise
            finally:
                code = str(status) if complete else "500" if failed else CANCELLED
                # The route's pattern: a path is the client's own choice, and every one would be a series.
                self._metrics.ended("http", getattr(scope.get("route"), "path", "unmatched"), code)
                if status == 429:
                    self._metrics.rejected("queue_full")


class TraceRequests:
    """ASGI middleware that traces POST requests: the others are pages, probes and scrapes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or process_tracer("ingress") is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        with ingress_span(f"POST {scope['path']}"[:128], headers, api="http") as span:
            others = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in TRACE_HEADERS]
            scope["headers"] = [*others, *((name.encode(), value.encode()) for name, value in span.headers.items())]

            async def note_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(http_status=message["status"])
                await send(message)

            await self._app(scope, receive, note_status)
