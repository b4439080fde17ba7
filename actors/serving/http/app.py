"""Builds the ingress' HTTP app: forwarded OpenAI paths, gRPC calls of the page as JSON, health, metrics, the page.

| path | answer |
|---|---|
| ``POST /v1/chat/completions`` … | vLLM's own, see openai/forward.py |
| ``POST /outrider/v1/stream`` | for a GenerateStreamRequest: an event per GenerateStreamResponse, then ``[DONE]`` |
| ``GET /outrider/v1/status``, ``GET /outrider/v1/model`` | GetServerStatusResponse, GetModelInfoResponse |
| ``POST /outrider/v1/token_texts`` | ``{"texts": [...]}``, the text of each of ``{"token_ids": [...]}`` |
| ``GET /livez``, ``/readyz``, ``/health``, ``/ping``, ``/version``, ``/metrics`` | |
| ``GET /`` | the page: plain files from ``static/`` |

Messages are protobuf's JSON, with the field names of the .proto files.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from fastapi import FastAPI, Request
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.actors.observability.metrics import ApplicationMetrics, CountRequests
from outrider.actors.observability.tracing import instrument
from outrider.actors.replica_calls import Broadcast, ReplicaReply, RequestError
from outrider.actors.serving.authentication import OWNER_IN_SCOPE, Authenticator
from outrider.actors.serving.failures import Failure, HttpError, failure_of
from outrider.actors.serving.grpc.calls import InProcessCall
from outrider.actors.serving.openai.forward import ClosingStream, OpenAIForwarder, body_of
from outrider.cluster.installed import VLLM, installed_version
from outrider.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from outrider.actors.serving.ingress import Ingress

logger = logging.getLogger("ray.serve.outrider.ingress")

SCRAPE_TIMEOUT_S = 4.0
"""Limit of the slowest replica. Prometheus gives up after 10 s unless configured otherwise."""

MAX_TOKEN_TEXTS = 512
ASSETS_PATH = "/outrider/page"
INDEX = "index.html"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # The browser asks each time: a new version is seen at once, an old one costs a 304.
    "cache-control": "no-cache",
}
EVENT_HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
UNGUARDED = ("/livez", "/readyz", "/health", "/ping", "/", ASSETS_PATH)
"""Paths that need no key: probes, and the page's files, which are the same for everybody."""

_Answer = TypeVar("_Answer")


def build_http_app(
    ingress: Ingress,
    authenticator: Authenticator,
    forwarder: OpenAIForwarder,
    target: DeploymentHandle,
    pool: DeploymentHandle | None,
    broadcast: Broadcast,
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """Builds the app. Errors have OpenAI's shape on all paths.

    FastAPI's own pages are off, since they load scripts from the network.
    """
    app = FastAPI(title="Outrider", openapi_url=None, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    forwarder.add_routes(app)
    _add_rpc_routes(app, ingress, target)
    add_operator_routes(app, ingress, target, pool, broadcast)
    add_page_routes(app)
    app.add_middleware(GuardRequests, authenticator=authenticator)
    if allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CountRequests)
    instrument(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = f"{HTTPStatus(error.status_code).phrase.title().replace(' ', '')}Error"
        said = {"message": f"{request.method} {request.url.path}: {error.detail}", "type": kind}
        body = {"error": {**said, "param": None, "code": error.status_code}}
        return JSONResponse(body, error.status_code, dict(error.headers or {}))

    async def of_any(request: Request, error: Exception) -> JSONResponse:
        return _response(failure_of(error, "the request"))

    app.add_exception_handler(HTTPException, of_http)
    for kind in (RequestError, HttpError, Exception):
        app.add_exception_handler(kind, of_any)


def _add_rpc_routes(app: FastAPI, ingress: Ingress, target: DeploymentHandle) -> None:
    def call_of(request: Request) -> InProcessCall:
        return InProcessCall(request.scope[OWNER_IN_SCOPE])

    @app.post("/outrider/v1/stream", include_in_schema=False)
    async def stream(request: Request) -> Response:
        message, call = pb.GenerateStreamRequest(), call_of(request)
        try:
            json_format.ParseDict(await _json_object(request), message)
        except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
            raise RequestError("body", " ".join(str(error).split()).rstrip("."), "change the request") from None
        answers = ingress.GenerateStream(message, call)
        # Before the status line leaves, so that a refused request gets a status of its own.
        first = await _or_failure(call, anext(answers))
        events = _events(call, first, answers)
        return ClosingStream(events, closes=events, headers=EVENT_HEADERS, media_type="text/event-stream")

    @app.get("/outrider/v1/status", include_in_schema=False)
    async def status(request: Request) -> Response:
        call = call_of(request)
        return _json(await _or_failure(call, ingress.GetServerStatus(pb.GetServerStatusRequest(), call)))

    @app.get("/outrider/v1/model", include_in_schema=False)
    async def model(request: Request) -> Response:
        call = call_of(request)
        return _json(await _or_failure(call, ingress.GetModelInfo(pb.GetModelInfoRequest(), call)))

    @app.post("/outrider/v1/token_texts", include_in_schema=False)
    async def texts(request: Request) -> Response:
        ids = (await _json_object(request)).get("token_ids")
        if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
            raise RequestError("token_ids", "is not a list of token ids", "send whole numbers from 0")
        if len(ids) > MAX_TOKEN_TEXTS:
            raise RequestError("token_ids", f"has {len(ids)} ids", f"send at most {MAX_TOKEN_TEXTS}")
        try:
            return JSONResponse({"texts": await target.token_texts.remote(ids)}, headers={"cache-control": "no-store"})
        except Exception as error:  # noqa: BLE001 - the kind of a replica's error is known once it is unpacked
            raise HttpError(failure_of(error, "token_texts")) from None


def add_operator_routes(
    app: FastAPI, ingress: Ingress, target: DeploymentHandle, pool: DeploymentHandle | None, broadcast: Broadcast
) -> None:
    @app.api_route("/livez", methods=["GET", "HEAD"], include_in_schema=False)
    async def alive() -> Response:
        """Answers while proxy and ingress run. What cannot serve now may recover by itself; see /readyz."""
        return Response(status_code=200)

    @app.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def health() -> Response:
        if await ingress.health() != health_pb2.HealthCheckResponse.SERVING:
            return _response(failure_of(ConnectionError("no target replica answers"), "health"))
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": installed_version(*VLLM), "outrider": installed_version("outrider")})

    async def ask(deployment: DeploymentHandle) -> list[ReplicaReply]:
        try:
            return await broadcast(deployment, "metrics", timeout_s=SCRAPE_TIMEOUT_S)
        except (DeploymentUnavailableError, ConnectionError) as error:
            if deployment is pool and isinstance(error, DeploymentUnavailableError):
                return []  # a pool may have no replica
            logger.warning("metrics: no replica could be asked: %s", error)
            return [ReplicaReply(None, error=str(error))]

    deployments, application = [target] if pool is None else [target, pool], ApplicationMetrics()

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        answers, own = await asyncio.gather(asyncio.gather(*map(ask, deployments)), ingress.all_metrics())
        # In a thread: tokens of every request pass through this event loop.
        text = await asyncio.to_thread(application.text, [reply for replies in answers for reply in replies], own)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _json_object(request: Request) -> dict[str, Any]:
    """Returns the body. Raises RequestError for anything but a JSON object.

    Another content type is refused, since web pages of other origins can send it without asking.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("content-type", "is not application/json", "send JSON")
    try:
        body = json.loads(await body_of(request))
    except (ValueError, RecursionError):
        raise RequestError("body", "is not JSON", "send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestError("body", "is not a JSON object", "send one")
    return body


async def _or_failure(call: InProcessCall, answer: Awaitable[_Answer]) -> _Answer:
    """Raises HttpError for an error that the RPC set on its context."""
    try:
        return await answer
    except RuntimeError:
        if (failure := _failure(call)) is None:
            raise
        raise HttpError(failure) from None


async def _events(
    call: InProcessCall, first: pb.GenerateStreamResponse, answers: AsyncGenerator[pb.GenerateStreamResponse, None]
) -> AsyncGenerator[str, None]:
    async with aclosing(answers):
        yield _event(_compact(first))
        try:
            async for answer in answers:
                yield _event(_compact(answer))
        except RuntimeError:
            if (failure := _failure(call)) is None:
                raise
            yield _event(json.dumps(failure.body()))
    yield _event("[DONE]")


def _failure(call: InProcessCall) -> Failure | None:
    code, message = call.code(), call.details()
    if code is None or code is grpc.StatusCode.OK:
        return None
    return Failure(code, message, message.partition(": ")[0] if code is grpc.StatusCode.INVALID_ARGUMENT else None)


def _event(text: str) -> str:
    return f"data: {text}\n\n"


def _compact(message: Message) -> str:
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)


def _json(message: Message) -> Response:
    """Returns the message as JSON. Zeros are included, so that readers need not know which fields there are."""
    text = json_format.MessageToJson(
        message, preserving_proto_field_name=True, indent=None, always_print_fields_with_no_presence=True
    )
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


def _response(failure: Failure) -> JSONResponse:
    return JSONResponse(failure.body(), failure.http_status, failure.http_headers)


class GuardRequests:
    """Authenticates requests, as ASGI middleware, on every path but UNGUARDED, and puts the owner into the scope."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app, self._authenticator = app, authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in UNGUARDED and not scope["path"].startswith(ASSETS_PATH):
            request = Request(scope)
            client = request.client.host if request.client else ""
            try:
                scope[OWNER_IN_SCOPE] = self._authenticator.owner_of(request.headers.get, client)
            except Exception as error:  # noqa: BLE001 - refused, with a status of its own
                await _response(failure_of(error, "the request"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class PageFiles(StaticFiles):
    """Serves the page's files with headers that keep other origins out."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def add_page_routes(app: FastAPI) -> None:
    """Adds the page. Raises RuntimeError when the installation lacks its files."""
    files = PageFiles(packages=[("outrider.actors.serving.http", "static")])
    app.mount(ASSETS_PATH, files)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response(INDEX, request.scope)
