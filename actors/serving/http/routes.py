"""The routes that generate, and those beside them: OpenAI's endpoints, and the gRPC API's streaming and status calls in
protobuf's JSON mapping.

| route | body | answer |
|---|---|---|
| ``POST /v1/chat/completions``, ``/v1/completions`` ... | OpenAI's and vLLM's | OpenAI's and vLLM's |
| ``POST /outrider/v1/stream`` | GenerateStreamRequest | one event per GenerateStreamResponse, then ``[DONE]`` |
| ``GET /outrider/v1/status`` | | GetServerStatusResponse |
| ``GET /outrider/v1/model`` | | GetModelInfoResponse |
| ``POST /outrider/v1/token_texts`` | ``{"token_ids": [...]}`` | ``{"texts": [...]}``, each token's own text |

Field names of the latter are those of the .proto files; camelCase ones are read too. Checks, limits and errors are the
RPCs' own, told the way HTTP tells them. However an answer ends early, client gone, deadline or error, the call to the
target is cancelled: that is what makes its engine abort the request.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import grpc
from fastapi import FastAPI, Request
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.actors.observability.logs import note_request
from outrider.actors.openai_calls import GENERATING, Endpoint, OpenAIHead, OpenAIRequest, TokensUsed
from outrider.actors.replica_calls import Broadcast, Deadline, ReplicaReply, RequestError
from outrider.actors.request_costs import USUAL_ANSWER_TOKENS
from outrider.actors.serving.access.guard import CALLER, Caller, key_of_caller
from outrider.actors.serving.access.owners import cache_salt, may_learn_from, tenant_of
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.connections import address_of
from outrider.actors.serving.draining import DRAIN, Draining
from outrider.actors.serving.failures import STATUS_DETAILS_METADATA
from outrider.actors.serving.grpc.calls import InProcessCall
from outrider.actors.serving.http.body import read_json_object
from outrider.actors.serving.openai.door import REQUEST_ID_HEADER, to_openai_request
from outrider.actors.serving.openai.errors import DONE, HttpError, HttpFailure, failure_of
from outrider.actors.serving.running import retried
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.actors.serving.ways_out import way_out
from outrider.cluster.installed import VLLM, installed_version
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.multimodal_config import MultimodalConfig
from outrider.v1 import generation_pb2 as pb

_TOLD_WITHIN_S = 0.5
"""Of a deadline, by the replica that had the request: else it never reached one."""

HEALTH_TIMEOUT_S = 5.0
"""A replica that is starting or stuck must not make a health check hang."""

_PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}

MAX_TOKEN_TEXTS = 512
MAX_PARSED_VALUES = 1 << 14

_UNCACHED = {"cache-control": "no-store"}
_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer")
Parts = AsyncGenerator[OpenAIHead | str, None]

TokenTexts = Callable[[list[int]], Awaitable[list[str]]]
"""Token ids to each one's own text. Raises RequestError for an id that is not in the vocabulary."""


class GenerationRpcs(Protocol):
    """The servicer whose RPCs these routes call: outrider.actors.serving.grpc.servicer.Ingress."""

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: Any, /
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]: ...

    def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: Any, /
    ) -> Awaitable[pb.GetServerStatusResponse]: ...

    def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: Any, /
    ) -> Awaitable[pb.GetModelInfoResponse]: ...

    def all_metrics_text(self) -> Awaitable[str]: ...


@dataclass(frozen=True)
class HttpContext:
    """What routes may use."""

    target: DeploymentHandle
    """The Target deployment; its methods are ``generate``, ``openai``, ``status`` …"""

    served_model_name: str
    num_speculative_tokens: int
    """K, 0 without a drafter."""

    max_retries: int
    """How often a request is sent again whose replica is lost before it has begun to answer."""

    rpcs: GenerationRpcs
    """The gRPC servicer."""

    broadcast: Broadcast

    capacity: Callable[[], int] | None = None
    """Requests that targets and queue hold together now, which proxies are told; None: unknown."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    admission: Admission = field(default_factory=lambda: Admission(LimitsConfig()))
    """The gRPC servicer's: both APIs are held together."""

    isolates_tenants: bool = False
    """Caches are a key's own."""

    docs: bool = True
    """Serve ``/openapi.json``."""

    has_adapters: bool = False
    """``model`` may name one."""

    multimodal: MultimodalConfig | None = None
    """What pictures are taken; None: none."""


def add_openai_routes(app: FastAPI, context: HttpContext) -> None:
    for path, endpoint in _PATHS.items():
        app.add_api_route(path, _answer(context, endpoint), methods=["POST"])

    # Of OpenAI's, to read, cancel and delete stored responses by id.
    app.add_api_route("/v1/responses/{rest:path}", _not_stored, methods=["GET", "POST", "DELETE"])

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await ask(context.target, _question(context, "models", request), context.max_retries)

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        if model != context.served_model_name and not context.has_adapters:
            message = f"the model {model[:60]!r} is not served here; {context.served_model_name!r} is"
            return HttpFailure(404, message, "model").response()
        return await ask(context.target, _question(context, "models", request, {"id": model}), context.max_retries)

    if context.docs:

        @app.get("/openapi.json")
        async def openapi(request: Request) -> Response:
            return await ask(context.target, _question(context, "openapi", request), context.max_retries)

    async def ask_health() -> list[ReplicaReply]:
        # Not an ordinary call: a queue that is full would refuse it, and a busy server is no sick one.
        return await context.broadcast(context.target, "check_health", timeout_s=HEALTH_TIMEOUT_S)

    poll = SharedPoll(ask_health)

    @app.get("/livez", include_in_schema=False)
    async def alive() -> Response:
        """Proxy and ingress answer. What cannot serve now may be mending itself; see /readyz."""
        return Response(status_code=200)

    @app.get("/readyz", include_in_schema=False)
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        if DRAIN.begun:
            return HttpFailure(503, str(Draining())).response()
        replies = await poll()
        if not any(reply.ok for reply in replies):
            return HttpFailure(503, f"no target replica answered within {HEALTH_TIMEOUT_S:g} s").response()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": installed_version(*VLLM), "outrider": installed_version("outrider")})


def _answer(context: HttpContext, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await read_json_object(request, context.limits)
        checked = to_openai_request(
            endpoint,
            body,
            request.headers,
            num_speculative_tokens=context.num_speculative_tokens,
            request_id=uuid.uuid4().hex,
            limits=context.limits,
            multimodal=context.multimodal,
        )
        admission = context.admission if endpoint in GENERATING else None
        if (model := checked.body.get("model")) != context.served_model_name and isinstance(model, str):
            checked = replace(checked, adapter=model)
        if context.isolates_tenants:
            checked = _of_tenant(checked, tenant_of(CALLER.get()))
        if (caller := tenant_of(CALLER.get())) != 0:
            learn = {} if may_learn_from(CALLER.get()) else {"learn": False}
            checked = replace(checked, round_options={**checked.round_options, "caller": caller, **learn})
        return await ask(context.target, checked, context.max_retries, admission)

    return answer


async def _not_stored() -> Response:
    message = "responses are not stored here, so none can be read, cancelled or deleted; keep the answer itself"
    return HttpFailure(404, message, "response_id").response()


def _of_tenant(request: OpenAIRequest, tenant: int) -> OpenAIRequest:
    if request.endpoint not in GENERATING or not tenant:
        return request
    asked = request.body.get("cache_salt")
    salt = cache_salt(tenant, asked if isinstance(asked, str) else None)
    body = {**request.body, "cache_salt": salt} if asked is None or isinstance(asked, str) else request.body
    return replace(request, body=body, round_options={**request.round_options, "tenant": tenant})


def _question(
    context: HttpContext, endpoint: Endpoint, request: Request, body: dict[str, Any] | None = None
) -> OpenAIRequest:
    deadline = Deadline.after(context.limits.control_timeout_s)
    return OpenAIRequest(endpoint, _id(request), body or {}, deadline=deadline)


def _id(request: Request) -> str:
    return request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex


async def ask(
    target: DeploymentHandle,
    request: OpenAIRequest,
    max_retries: int,
    admission: Admission | None = None,
) -> Response:
    """The whole answer, or a response that goes on as it is sent.

    target: the Target deployment. max_retries: how often a request is sent again whose replica is lost before it has
    begun to answer. admission: what it is counted in, for a generation.
    Raises HttpError.
    """
    note_request(request.request_id)
    parts = _counted(_parts(target, request, max_retries, admission), CALLER.get(), request)
    try:
        head = await anext(parts)
        assert isinstance(head, OpenAIHead)
        if head.is_stream:
            return EventStream(_openai_events(parts, request))
        body = [part async for part in parts if isinstance(part, str)]
        return Response("".join(body), head.status, head.headers, head.media_type)
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a status and a sentence
        raise HttpError(failure_of(error, request.request_id)) from None


async def _counted(
    parts: AsyncGenerator[OpenAIHead | str | TokensUsed, None],
    caller: Caller | None,
    request: OpenAIRequest,
) -> Parts:
    """parts without the tokens, which the caller is charged for. An answer in one piece that is not waited for, or not
    made in time, is charged as what was asked for: nobody tells what it had come to."""
    told = given_up = False
    async with aclosing(parts):
        try:
            async for part in parts:
                if not isinstance(part, TokensUsed):
                    given_up |= isinstance(part, OpenAIHead) and part.status == HTTPStatus.REQUEST_TIMEOUT
                    yield part
                    continue
                told = True
                if caller is not None:
                    caller.used(part.prompt, part.completion)
        except (GeneratorExit, asyncio.CancelledError):
            given_up = True
            raise
        finally:
            whole = request.endpoint in GENERATING and not request.body.get("stream")
            if whole and given_up and not told and caller is not None:
                caller.used(request.prompt_tokens, request.num_answers * (request.max_tokens or USUAL_ANSWER_TOKENS))


async def _parts(
    target: DeploymentHandle, request: OpenAIRequest, max_retries: int, admission: Admission | None
) -> AsyncGenerator[OpenAIHead | str | TokensUsed, None]:
    """The deadline is watched here too, since a request may spend it waiting for a replica."""
    call = target.openai.options(stream=True)

    def send(avoid: tuple[str, ...]) -> Any:
        return call.remote(replace(request, avoid_replicas=avoid, way_out=way_out()))

    with nullcontext() if admission is None else admission.hold(request, key_of_caller()):
        async with aclosing(retried(send, max_retries=max_retries, request_id=request.request_id)) as stream:
            while True:
                left_s = request.seconds_left()
                async with asyncio.timeout(None if left_s is None else left_s + _TOLD_WITHIN_S):
                    part = await anext(stream, None)
                if part is None:
                    return
                yield part


async def _openai_events(parts: Parts, request: OpenAIRequest) -> AsyncGenerator[str, None]:
    """The status is out: what goes wrong now is an event."""
    count = 0
    async with aclosing(parts):
        try:
            async for part in parts:
                assert isinstance(part, str)
                yield part
                count += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a sentence
            yield failure_of(error, request.request_id).event_of(request.endpoint, count)


def add_generation_routes(app: FastAPI, rpcs: GenerationRpcs, token_texts: TokenTexts, limits: LimitsConfig) -> None:

    @app.post("/outrider/v1/stream", include_in_schema=False)
    async def stream(request: Request) -> Response:
        message = to_message(await read_json_object(request, limits), pb.GenerateStreamRequest())
        call = InProcessCall.over_http(None if request.client is None else address_of(*request.client))
        answers = rpcs.GenerateStream(message, call)
        # Before the status line leaves, so that what is refused at the door gets a status of its own.
        first = await _or_failure(call, anext(answers))
        return EventStream(_rpc_events(call, first, answers))

    @app.get("/outrider/v1/status", include_in_schema=False)
    async def status() -> Response:
        call = InProcessCall.over_http()
        return _json(await _or_failure(call, rpcs.GetServerStatus(pb.GetServerStatusRequest(), call)))

    @app.get("/outrider/v1/model", include_in_schema=False)
    async def model() -> Response:
        call = InProcessCall.over_http()
        return _json(await _or_failure(call, rpcs.GetModelInfo(pb.GetModelInfoRequest(), call)))

    @app.post("/outrider/v1/token_texts", include_in_schema=False)
    async def texts(request: Request) -> Response:
        ids = to_token_ids(await read_json_object(request, limits))
        try:
            async with asyncio.timeout(limits.control_timeout_s):
                known = await token_texts(ids)
        except Exception as error:  # noqa: BLE001 - the kind of a replica's error is known once it is unpacked
            raise HttpError(failure_of(error, "token_texts")) from None
        return JSONResponse({"texts": known}, headers=_UNCACHED)


def to_message(body: dict[str, Any], message: _Request) -> _Request:
    """Fill message in. Raises RequestError for fields it does not have and values that do not fit, and for more than
    MAX_PARSED_VALUES of them: protobuf's parser of JSON takes some microseconds for each, in which everybody waits."""
    if (values := _num_values(body)) > MAX_PARSED_VALUES:
        raise RequestError("body", f"holds {values} values", f"send at most {MAX_PARSED_VALUES}, or more over gRPC")
    try:
        json_format.ParseDict(body, message)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise RequestError("body", " ".join(str(error).split()).rstrip("."), "change the request") from None
    return message


def _num_values(body: dict[str, Any]) -> int:
    """Members of objects and arrays, at any depth."""
    count, left = 0, list[Any]([body])
    while left:
        inner = left.pop()
        count += len(inner)
        members = inner.values() if isinstance(inner, dict) else inner
        left.extend(member for member in members if isinstance(member, (dict, list)))
    return count


def to_token_ids(body: dict[str, Any]) -> list[int]:
    """Raises RequestError for anything but {"token_ids": [id, ...]}."""
    if unknown := sorted(set(body) - {"token_ids"}):
        raise RequestError(unknown[0], "is not a field of this request", "send token_ids alone")
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise RequestError("token_ids", "is not a list of token ids", "send whole numbers from 0")
    if len(ids) > MAX_TOKEN_TEXTS:
        raise RequestError("token_ids", f"{len(ids)} ids are too many", f"send at most {MAX_TOKEN_TEXTS}")
    return ids


async def _rpc_events(
    call: InProcessCall, first: pb.GenerateStreamResponse, answers: AsyncGenerator[pb.GenerateStreamResponse, None]
) -> AsyncGenerator[str, None]:
    async with aclosing(answers):
        yield event(_compact(first))
        try:
            async for answer in answers:
                yield event(_compact(answer))
        except RuntimeError:
            if (failure := _failure(call)) is None:
                raise
            yield event(json.dumps(failure.body()))
    yield DONE


async def _or_failure(call: InProcessCall, answer: Awaitable[_Answer]) -> _Answer:
    """Raises HttpError for an error that the RPC told its context; the ingress then ends with a RuntimeError."""
    try:
        return await answer
    except RuntimeError:
        if (failure := _failure(call)) is None:
            raise
        raise HttpError(failure) from None


def _compact(message: Message) -> str:
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None)


def _json(message: Message) -> Response:
    """Zeros included, so that readers need not know which fields there are."""
    text = json_format.MessageToJson(
        message, preserving_proto_field_name=True, indent=None, always_print_fields_with_no_presence=True
    )
    return Response(text, media_type="application/json", headers=_UNCACHED)


def _failure(call: InProcessCall) -> HttpFailure | None:
    """The error the RPC ended with; None: it set none."""
    if (code := call.code()) is None or code is grpc.StatusCode.OK:
        return None
    packed = dict(call.trailing_metadata()).get(STATUS_DETAILS_METADATA, b"")
    assert isinstance(packed, bytes)
    refusal, field_at_fault = error_details_pb2.BadRequest(), None
    for detail in status_pb2.Status.FromString(packed).details:
        if detail.Unpack(refusal) and refusal.field_violations:
            field_at_fault = refusal.field_violations[0].field
    return HttpFailure.of_code(code, call.details(), field_at_fault)


def event(json_text: str) -> str:
    """json_text: without line breaks, which would end the event."""
    return f"data: {json_text}\n\n"


class EventStream(StreamingResponse):
    """Closes its generator however the response ends. Serve cancels the task of a client that has left, often while
    the generator waits for nothing; unclosed it would hold its request in the engine until it is collected."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        # No transformation, no buffering: proxies on the way would hold back rounds.
        headers = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)
