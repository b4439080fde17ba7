"""``GET /metrics``: the application in Prometheus' text format; and HTTP requests counted on their way through."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import Response
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.http.tracing import TraceRequests
from actors.observability.exposition import CONTENT_TYPE
from actors.observability.metrics import CANCELLED, METRICS, ApplicationMetrics, IngressMetrics, Scraped
from actors.routing.broadcast import broadcast

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve.outrider.ingress")

SCRAPE_TIMEOUT_S = 4.0
"""For the slowest replica. Prometheus gives up after 10 s unless told otherwise."""

UNMATCHED = "unmatched"
_TOO_MANY_REQUESTS = 429


def add_metrics_routes(app: FastAPI, target: DeploymentHandle, metrics: IngressMetrics = METRICS) -> None:
    """target: the Target deployment, whose replicas offer ``metrics_text``."""

    async def ask_replicas() -> Sequence[Scraped]:
        try:
            replies = await broadcast(target, "metrics_text", timeout_s=SCRAPE_TIMEOUT_S)
        except (DeploymentUnavailableError, ConnectionError) as error:
            logger.warning("metrics: no replica could be asked: %s", error)
            return [Scraped(None, None)]
        return [Scraped(reply.replica_id, reply.value if reply.ok else None) for reply in replies]

    application = ApplicationMetrics(ask_replicas, metrics.text)

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        return Response(await application.text(), headers={"content-type": CONTENT_TYPE})

    app.add_middleware(TraceRequests)
    app.add_middleware(CountRequests, metrics=metrics)


class CountRequests:
    """ASGI middleware. A request counts when its response has ended, under its route, with its status."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
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
                self._metrics.ended("http", _route(scope), code)
                if status == _TOO_MANY_REQUESTS:
                    self._metrics.rejected("queue_full")


def _route(scope: Scope) -> str:
    """The route's pattern: a path is the client's own choice, and every one would be a series."""
    return getattr(scope.get("route"), "path", UNMATCHED)
