"""HTTP requests under a span of the ingress: what is behind finds it in the headers, as if the client had sent it.

The page at ``/``: plain files from ``static/``, no build step, nothing from anywhere else.

``GET /metrics``: the application in Prometheus' text format; and HTTP requests counted on their way through.

The one ASGI app of the ingress deployment. Every part of it adds its own routes here.

The ingress deployment's class: gRPC servicer and HTTP app in one replica.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.observability.exposition import CONTENT_TYPE
from outrider.actors.observability.metrics import CANCELLED, METRICS, ApplicationMetrics, IngressMetrics, Scraped
from outrider.actors.observability.tracing import TRACE_HEADERS, ingress_span, process_tracer
from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serve_seam.http_proxy import TellCapacity
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.actors.serving.http.errors import add_error_handlers
from outrider.actors.serving.http.routes import GenerationRpcs, add_generation_routes, add_openai_routes

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


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


ASSETS_PATH = "/outrider/page"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Kept by the browser, asked about each time: a new version is seen at once, an old one costs a 304.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


def load_static_files() -> dict[str, StaticFile]:
    """By file name."""
    files = {}
    for entry in resources.files("outrider.actors.serving.http").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            files[entry.name] = StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def add_page_routes(app: FastAPI) -> None:
    """Raises FileNotFoundError when the installation lacks the page's files."""
    files = load_static_files()
    if INDEX not in files:
        raise FileNotFoundError("actors/http/static/index.html is not installed; install outrider again")
    paths = {"/": files.pop(INDEX)} | {f"{ASSETS_PATH}/{name}": file for name, file in files.items()}
    for path, file in paths.items():
        app.add_api_route(path, _route(file), methods=["GET", "HEAD"], include_in_schema=False)


def _route(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.etag}

    async def respond(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return respond


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
                self._metrics.ended("http", _metrics_route(scope), code)
                if status == _TOO_MANY_REQUESTS:
                    self._metrics.rejected("queue_full")


def _metrics_route(scope: Scope) -> str:
    """The route's pattern: a path is the client's own choice, and every one would be a series."""
    return getattr(scope.get("route"), "path", UNMATCHED)


@dataclass(frozen=True)
class HttpContext:
    """What routes may use."""

    target: DeploymentHandle
    """The Target deployment; its methods are ``generate``, ``openai``, ``status`` …"""

    served_model_name: str
    num_speculative_tokens: int
    """K, 0 without a drafter."""

    max_request_bytes: int
    """Longest body that is read."""

    max_retries: int
    """How often a request is sent again whose replica is lost before it has begun to answer."""

    rpcs: GenerationRpcs
    """The gRPC servicer."""

    capacity: int | None = None
    """Requests that targets and queue hold together, which proxies are told; None: unknown."""


def build_http_app(context: HttpContext) -> FastAPI:
    """Routes of all parts. Errors have OpenAI's shape on all of them. No pages of FastAPI's: they load scripts from
    the network."""
    app = FastAPI(title="Outrider", openapi_url=None, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    add_openai_routes(app, context)
    add_generation_routes(app, context.rpcs, context.target.token_texts.remote, context.max_request_bytes)
    add_page_routes(app)
    add_metrics_routes(app, context.target)
    if context.capacity is not None:
        app.add_middleware(TellCapacity, capacity=context.capacity)
    return app


@serve.ingress()
class Front(Ingress):
    """Ingress answers gRPC; Serve gives HTTP requests to the app that is built here, in the replica."""

    def __init__(
        self,
        target: DeploymentHandle,
        served_model_name: str,
        num_speculative_tokens: int,
        *args: Any,
        max_request_bytes: int,
        **kwargs: Any,
    ) -> None:
        """args, kwargs: Ingress's own. max_request_bytes: longest HTTP body that is read."""
        super().__init__(target, served_model_name, num_speculative_tokens, *args, **kwargs)
        self._http = HttpContext(
            target,
            served_model_name,
            num_speculative_tokens,
            max_request_bytes,
            self._max_retries,
            self,
            kwargs.get("capacity"),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_http_app(self._http)
