"""Forwards requests of OpenAI's API, as they came, from the ingress to vLLM's own server in a target replica.

The body is read for routing and for ``speculation`` only. vLLM answers everything else, errors included.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from fastapi import FastAPI, Request
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.actors.observability.logs import note_request
from outrider.actors.observability.tracing import forwarded
from outrider.actors.replica_calls import Deadline, HttpCall, HttpHead, RequestError
from outrider.actors.request_ids import is_usable_id
from outrider.actors.serving.authentication import OWNER_IN_SCOPE
from outrider.actors.serving.failures import HttpError, Refused, failure_of
from outrider.actors.serving.routing.request_profile import of_body
from outrider.actors.serving.running import RunningRequest, RunningRequests
from outrider.cluster.config import OutriderConfig

ANTHROPIC = "/v1/messages"
GENERATING = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    ANTHROPIC,
    "/inference/v1/generate",
    "/generative_scoring",
    "/v1/systemone",
    "/invocations",
)
"""Paths of vLLM's server that generate."""

CONTROL = (
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
)
OF_ONE_REPLICA = (
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
)
"""Paths whose state is in one replica."""

REQUEST_ID_HEADER, TIMEOUT_HEADER = "x-request-id", "x-request-timeout-ms"
BODY_TIMEOUT_S = 30.0
"""Seconds within which a body must have come. The gateway limits the first 32 KiB only."""

_NOT_FORWARDED = (b"authorization", b"x-api-key", b"cookie", b"content-length", b"transfer-encoding", b"connection")
_OF_GATEWAY = b"x-outrider-"
_NOT_SENT_BACK = (b"transfer-encoding", b"connection")


class OpenAIForwarder:
    """Forwards HTTP requests to target replicas."""

    def __init__(self, target: DeploymentHandle, running: RunningRequests, config: OutriderConfig) -> None:
        """Prepares the calls to the Target deployment. running: registers requests while they run."""
        self._call = target.http.options(stream=True)
        self._running, self._config, self._limits = running, config, config.serving

    def add_routes(self, app: FastAPI) -> None:
        """Adds the paths of vLLM's server that are forwarded. Others do not exist here."""
        generate, forward = (partial(self._forward, generates=generates) for generates in (True, False))
        for path in GENERATING:
            app.add_route(path, generate, methods=["POST"])
        for method, path in CONTROL:
            app.add_route(path, forward, methods=[method])
        for method, path in OF_ONE_REPLICA:
            app.add_route(path, forward if self._limits.most_replicas == 1 else _of_one_replica, methods=[method])

    async def _forward(self, request: Request, *, generates: bool) -> Response:
        """Forwards a request. Raises HttpError."""
        request_id = request.headers.get(REQUEST_ID_HEADER, "")
        try:
            call = await self._call_of(request, generates)
            request_id = call.request_id
            note_request(request_id)
            parts = self._parts(call)
            head = await anext(parts, None)
            if head is None:
                raise Refused(grpc.StatusCode.CANCELLED, f"request {request_id} was aborted")
            assert isinstance(head, HttpHead)
            return _forwarded(call.path, head, parts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a status and a sentence
            raise HttpError(failure_of(error, f"request {request_id}")) from None

    async def _call_of(self, request: Request, generates: bool) -> HttpCall:
        """Converts the request. Raises RequestError and Refused. GuardRequests has put the owner into the scope."""
        owner: int = request.scope[OWNER_IN_SCOPE]
        content = await body_of(request)
        body: Any = None
        with suppress(ValueError, RecursionError):  # vLLM says what is wrong with it
            body = json.loads(content) if content else None
        asked_id = body.get("request_id") if isinstance(body, dict) else None
        # Serve gives each request that brings no id a header of its own.
        request_id = asked_id if isinstance(asked_id, str) else request.headers.get(REQUEST_ID_HEADER)
        request_id = request_id or uuid.uuid4().hex
        if not is_usable_id(request_id):
            problem = "is not usable as an id"
            raise RequestError(REQUEST_ID_HEADER, problem, "send 1 to 128 printable ASCII characters without spaces")
        if isinstance(body, dict) and body.get("speculation") is not None:
            body = _with_flat_keys(body)
            content = json.dumps(body).encode("utf-8", "surrogatepass")
        headers = [
            (name, value)
            for name, value in request.scope["headers"]
            if name not in _NOT_FORWARDED and name != b"x-request-id" and not name.startswith(_OF_GATEWAY)
        ]
        return HttpCall(
            request.method,
            request.url.path,
            request.scope.get("query_string", b""),
            (*forwarded(headers), (b"x-request-id", request_id.encode())),
            content,
            request_id,
            of_body(body, self._config.served_model_name) if generates and isinstance(body, dict) else None,
            caller=owner,
            tenant=owner if self._limits.tenant_isolation else 0,
            deadline=self._deadline(request.headers.get(TIMEOUT_HEADER), generates),
        )

    def _deadline(self, timeout_ms: str | None, generates: bool) -> Deadline:
        most_s = self._limits.greatest_timeout_s
        if timeout_ms is None:
            return Deadline.after(self._limits.default_timeout_s if generates else 60.0)
        is_number = timeout_ms.isascii() and timeout_ms.isdigit() and len(timeout_ms) <= 12
        if not is_number or not 0 < int(timeout_ms) <= most_s * 1000:
            raise RequestError(
                TIMEOUT_HEADER, "is not a time in milliseconds", f"send 1 to {int(most_s * 1000)}, or leave it out"
            )
        return Deadline.after(int(timeout_ms) / 1000)

    async def _parts(self, call: HttpCall) -> AsyncGenerator[HttpHead | bytes, None]:
        def send(avoid: tuple[str, ...]) -> Any:
            return self._call.remote(replace(call, avoid_replicas=avoid))

        held = (
            nullcontext(RunningRequest()) if call.routed is None else self._running.hold(call.caller, call.request_id)
        )
        with held as running:
            retries = self._limits.most_replicas - 1
            messages = running.messages(send, call, max_retries=retries, has_begun=lambda part: isinstance(part, bytes))
            async with aclosing(messages):
                async for part in messages:
                    yield part


class ClosingStream(StreamingResponse):
    """Streams a body and closes its generator however the response ends.

    Serve cancels the task of a client that has left, often while the generator is not running; unclosed, the generator
    would hold its request in the engine until it is collected.
    """

    def __init__(self, content: AsyncIterable[Any], *, closes: AsyncGenerator[Any, None], **options: Any) -> None:
        super().__init__(content, **options)
        self._closes = closes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._closes):
            await super().__call__(scope, receive, send)


def _forwarded(path: str, head: HttpHead, parts: AsyncGenerator[HttpHead | bytes, None]) -> Response:
    """Returns a response that sends each part of the replica's when it comes."""
    sent_back = [(name.lower(), value) for name, value in head.headers if name.lower() not in _NOT_SENT_BACK]
    is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in sent_back)
    bodies = _bodies(parts)
    if is_stream:
        bodies = _events(path, bodies)
        # Proxies on the way would hold back rounds.
        sent_back += [(b"cache-control", b"no-store, no-transform"), (b"x-accel-buffering", b"no")]
    response = ClosingStream(bodies, closes=parts, status_code=head.status)
    response.raw_headers = sent_back
    return response


async def _bodies(parts: AsyncGenerator[HttpHead | bytes, None]) -> AsyncGenerator[bytes, None]:
    async for part in parts:
        if isinstance(part, bytes):
            yield part


async def _events(path: str, bodies: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields a stream of events. An error becomes one more event, in the shape of the path's API."""
    try:
        async for body in bodies:
            yield body
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a sentence
        told = failure_of(error, "the request").body()
        if path == ANTHROPIC:
            yield f"event: error\ndata: {json.dumps({'type': 'error', **told})}\n\n".encode()
        else:
            yield f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode()


async def body_of(request: Request) -> bytes:
    """Returns the body. Raises Refused when it does not come in time."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise Refused(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"the body did not come within {BODY_TIMEOUT_S:g} s; send it faster"
        ) from None


def _with_flat_keys(body: dict[str, Any]) -> dict[str, Any]:
    """Moves the object ``speculation`` to where vLLM takes what it does not know. Raises RequestError."""
    asked, xargs = body["speculation"], body.get("vllm_xargs") or {}
    if not isinstance(asked, dict) or not isinstance(xargs, dict):
        raise RequestError("speculation", "is not an object", 'send {"num_speculative_tokens": 2}, or leave it out')
    flat = {f"speculation.{name}": int(value) if isinstance(value, bool) else value for name, value in asked.items()}
    rest = {name: value for name, value in body.items() if name != "speculation"}
    if "token_ids" not in body:
        return {**rest, "vllm_xargs": {**xargs, **flat}}
    params = body.get("sampling_params")  # of /inference/v1/generate
    if not isinstance(params, dict) or not isinstance(extra := params.get("extra_args") or {}, dict):
        return rest  # which vLLM refuses
    return {**rest, "sampling_params": {**params, "extra_args": {**extra, **flat}}}


async def _of_one_replica(request: Request) -> Response:
    problem = f"{request.url.path} is about one replica, and this deployment has several"
    fix = "list adapters in target.lora_modules, and send the whole conversation in input"
    raise RequestError("path", problem, fix)
