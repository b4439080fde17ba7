"""HTTP on the ingress: one ASGI app of OpenAI's endpoints, the gRPC calls over HTTP, health, metrics and the page, and
the deployment's class, which answers gRPC and HTTP in one replica.

The page at ``/`` is plain files from ``static/``, no build step, nothing from anywhere else. ``GET /metrics`` is the
application in Prometheus' text format. Middlewares count and trace requests on their way through, and tell proxies how
many there is room for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.observability.exposition import CONTENT_TYPE
from outrider.actors.observability.metrics import CANCELLED, METRICS, ApplicationMetrics, IngressMetrics, Scraped
from outrider.actors.observability.tracing import TRACE_HEADERS, ingress_span, process_tracer
from outrider.actors.replica_calls import Broadcast, RequestError
from outrider.actors.serving.access.calls import GuardedHttp
from outrider.actors.serving.access.process import ingress_guard
from outrider.actors.serving.gate import CAPACITY_METADATA, REFUSED
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.actors.serving.heap import return_memory
from outrider.actors.serving.http.adapters import AdapterCalls, add_adapter_routes
from outrider.actors.serving.http.admin import AdminAddress, move_to_admin_port
from outrider.actors.serving.http.browsers import CheckBrowsers
from outrider.actors.serving.http.routes import HttpContext, add_generation_routes, add_openai_routes
from outrider.actors.serving.openai.errors import HttpError, HttpFailure, failure_of, refused_by_key
from outrider.actors.serving.ways_out import COMES_THROUGH, PROXY
from outrider.cluster.multimodal_config import MultimodalConfig

logger = logging.getLogger("ray.serve.outrider.ingress")

SCRAPE_TIMEOUT_S = 4.0
"""For the slowest replica. Prometheus gives up after 10 s unless told otherwise."""

UNMATCHED = "unmatched"
_TOO_MANY_REQUESTS = 429

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


@serve.ingress()
class Front(Ingress):
    """Ingress answers gRPC; Serve gives HTTP requests to the app that is built here, in the replica."""

    def __init__(
        self,
        target: DeploymentHandle,
        served_model_name: str,
        num_speculative_tokens: int,
        *args: Any,
        docs: bool = True,
        admin: AdminAddress | None = None,
        pool: DeploymentHandle | None = None,
        registry: Callable[[], Any] | None = None,
        multimodal: MultimodalConfig | None = None,
        **kwargs: Any,
    ) -> None:
        """args, kwargs: Ingress's own. docs: serve ``/openapi.json``. admin: where metrics and status are, alone; None:
        with the rest. pool: the DrafterPool deployment. registry: the handle of the application's, for adapters that
        come and go. multimodal: what pictures are taken; None: none."""
        return_memory()
        super().__init__(target, served_model_name, num_speculative_tokens, *args, **kwargs)
        self._http = HttpContext(
            target,
            served_model_name,
            num_speculative_tokens,
            self._max_retries,
            self,
            self._broadcast,
            None if self._capacity is None else partial(self._capacity.now, target),
            self._limits,
            self._admission,
            self._isolates_tenants,
            docs,
            has_adapters=self._lora is not None,
            multimodal=multimodal,
        )
        self._admin, self._pool = admin, pool
        self._adapter_calls = None
        if self._lora is not None and self._lora.load_from is not None and registry is not None:
            self._adapter_calls = AdapterCalls(target, self._broadcast, self._lora, served_model_name, registry)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_http_app(self._http, self._pool)
        if self._adapter_calls is not None:
            add_adapter_routes(app, self._adapter_calls, self._limits)
        if self._admin is not None:
            move_to_admin_port(app, self._admin, self._limits)
        return app


def build_http_app(context: HttpContext, pool: DeploymentHandle | None = None) -> FastAPI:
    """Routes of all parts. Errors have OpenAI's shape on all of them. No pages of FastAPI's: they load scripts from
    the network."""
    app = FastAPI(title="Outrider", openapi_url=None, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    add_openai_routes(app, context)
    add_generation_routes(app, context.rpcs, context.target.token_texts.remote, context.limits)
    add_page_routes(app)
    add_route_patterns(app, context.target, pool, context.broadcast, context.rpcs.all_metrics_text)
    for route in app.routes:
        if isinstance(route, APIRoute) and "GET" in route.methods:
            route.methods.add("HEAD")  # by which load balancers probe; the server sends no body then
    app.add_middleware(CheckBrowsers, limits=context.limits)
    if context.capacity is not None:
        app.add_middleware(TellCapacity, capacity=context.capacity)
    app.add_middleware(GuardedHttp, failed=refused_by_key, guard=ingress_guard, in_proxy=False)  # the outermost
    return app


def add_error_handlers(app: FastAPI) -> None:
    """OpenAI's shape for what routes raise and for paths and methods that do not exist."""

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return HttpFailure(error.status_code, message, headers=dict(error.headers or {})).response()

    async def of_any(request: Request, error: Exception) -> JSONResponse:
        return failure_of(error, request.headers.get("x-request-id", "")).response()

    app.add_exception_handler(HTTPException, of_http)
    for kind in (RequestError, HttpError, Exception):
        app.add_exception_handler(kind, of_any)


def add_route_patterns(
    app: FastAPI,
    target: DeploymentHandle,
    pool: DeploymentHandle | None,
    broadcast: Broadcast,
    own_text: Callable[[], Awaitable[str]],
) -> None:
    """target, pool: whose replicas offer ``metrics_text``. own_text: what ingresses count."""
    deployments = [target] if pool is None else [target, pool]

    async def ask(deployment: DeploymentHandle) -> list[Scraped]:
        try:
            replies = await broadcast(deployment, "metrics_text", timeout_s=SCRAPE_TIMEOUT_S)
        except (DeploymentUnavailableError, ConnectionError) as error:
            if deployment is pool and isinstance(error, DeploymentUnavailableError):
                return []  # it may have none, and then nobody is silent
            logger.warning("metrics: no replica could be asked: %s", error)
            return [Scraped(None, None)]
        return [Scraped(reply.replica_id, reply.value if reply.ok else None) for reply in replies]

    async def ask_replicas() -> Sequence[Scraped]:
        return [answer for answers in await asyncio.gather(*map(ask, deployments)) for answer in answers]

    application = ApplicationMetrics(ask_replicas, own_text)

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        return Response(await application.text(), headers={"content-type": CONTENT_TYPE})

    app.add_middleware(TraceRequests)
    app.add_middleware(CountRequests, metrics=METRICS)


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

        if refused := scope.get(REFUSED):  # the proxy's, which no client can write into
            self._metrics.refused_generations("proxy", refused)
        COMES_THROUGH.set(scope.get(PROXY, ""))
        with self._metrics.in_flight("http"):
            failed = False
            try:
                await self._app(scope, receive, note_status)
            except Exception:
                failed = True
                raise
            finally:
                code = str(status) if complete else "500" if failed else CANCELLED
                self._metrics.ended("http", _route_pattern(scope), code)
                if status == _TOO_MANY_REQUESTS:
                    self._metrics.rejected("queue_full")


def _route_pattern(scope: Scope) -> str:
    """The route's pattern: a path is the client's own choice, and every one would be a series."""
    return getattr(scope.get("route"), "path", UNMATCHED)


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


class TellCapacity:
    """ASGI middleware of the ingress: a header with every response."""

    def __init__(self, app: ASGIApp, capacity: Callable[[], int]) -> None:
        self._app, self._capacity = app, capacity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append(CAPACITY_METADATA, str(self._capacity()))
            await send(message)

        await self._app(scope, receive, tell if scope["type"] == "http" else send)


def add_page_routes(app: FastAPI) -> None:
    """Raises FileNotFoundError when the installation lacks the page's files."""
    files = load_static_files()
    if INDEX not in files:
        raise FileNotFoundError("actors/serving/http/static/index.html is not installed; install outrider again")
    paths = {"/": files.pop(INDEX)} | {f"{ASSETS_PATH}/{name}": file for name, file in files.items()}
    for path, file in paths.items():
        app.add_api_route(path, _responder(file), include_in_schema=False)


def _responder(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.etag}

    async def respond(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return respond


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
