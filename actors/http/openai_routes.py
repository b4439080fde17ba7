"""OpenAI's endpoints, and what vLLM's users expect beside them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from actors.http.body import read_json_object
from actors.http.door import REQUEST_ID_HEADER, to_openai_request
from actors.http.errors import HttpFailure
from actors.http.relay import ask
from actors.openai.messages import Endpoint, OpenAIRequest
from actors.routing.broadcast import broadcast
from cluster.versions import VLLM, installed_version

if TYPE_CHECKING:
    from actors.http.app import HttpContext

HEALTH_TIMEOUT_S = 5.0
"""A replica that is starting or stuck must not make a health check hang."""

_PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


def add_openai_routes(app: FastAPI, context: HttpContext) -> None:
    for path, endpoint in _PATHS.items():
        app.add_api_route(path, _answer(context, endpoint), methods=["POST"])

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await ask(context.target, OpenAIRequest("models", _id(request)), context.max_retries)

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        if model != context.served_model_name:
            message = f"the model {model[:60]!r} is not served here; {context.served_model_name!r} is"
            return HttpFailure(404, message, "model").response()
        return await ask(context.target, OpenAIRequest("models", _id(request), {"id": model}), context.max_retries)

    @app.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        return await ask(context.target, OpenAIRequest("openapi", _id(request)), context.max_retries)

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        # Not an ordinary call: a queue that is full would refuse it, and a busy server is no sick one.
        replies = await broadcast(context.target, "check_health", timeout_s=HEALTH_TIMEOUT_S)
        if not any(reply.ok for reply in replies):
            return HttpFailure(503, f"no target replica answered within {HEALTH_TIMEOUT_S:g} s").response()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": installed_version(*VLLM), "outrider": installed_version("outrider")})


def _answer(context: HttpContext, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await read_json_object(request, context.max_request_bytes)
        checked = to_openai_request(
            endpoint,
            body,
            request.headers,
            num_speculative_tokens=context.num_speculative_tokens,
            request_id=uuid.uuid4().hex,
        )
        return await ask(context.target, checked, context.max_retries)

    return answer


def _id(request: Request) -> str:
    return request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
