"""The gRPC API's streaming and status calls over HTTP, in protobuf's JSON mapping.

| route | body | answer |
|---|---|---|
| ``POST /outrider/v1/stream`` | GenerateStreamRequest | one event per GenerateStreamResponse, then ``[DONE]`` |
| ``GET /outrider/v1/status`` | | GetServerStatusResponse |
| ``GET /outrider/v1/model`` | | GetModelInfoResponse |
| ``POST /outrider/v1/token_texts`` | ``{"token_ids": [...]}`` | ``{"texts": [...]}``, each token's own text |

Field names are those of the .proto files; camelCase ones are read too. Checks, limits and errors are the RPCs' own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response

from actors.generation import RequestError
from actors.http.body import read_json_object
from actors.http.errors import HttpError, failure_of
from actors.http.event_stream import DONE, EventStream, event
from actors.http.rpc_call import RpcCall
from outrider.v1 import generation_pb2 as pb

MAX_TOKEN_TEXTS = 512

_UNCACHED = {"cache-control": "no-store"}
_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer")


class GenerationRpcs(Protocol):
    """The servicer whose RPCs these routes call: actors.ingress.servicer.Ingress."""

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: Any, /
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]: ...

    def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: Any, /
    ) -> Awaitable[pb.GetServerStatusResponse]: ...

    def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: Any, /
    ) -> Awaitable[pb.GetModelInfoResponse]: ...


TokenTexts = Callable[[list[int]], Awaitable[list[str]]]
"""Token ids to each one's own text. Raises RequestError for an id that is not in the vocabulary."""


def add_generation_routes(app: FastAPI, rpcs: GenerationRpcs, token_texts: TokenTexts, max_request_bytes: int) -> None:
    """max_request_bytes: longest body that is read."""

    @app.post("/outrider/v1/stream", include_in_schema=False)
    async def stream(request: Request) -> Response:
        message = to_message(await read_json_object(request, max_request_bytes), pb.GenerateStreamRequest())
        call = RpcCall()
        answers = rpcs.GenerateStream(message, call)
        # Before the status line leaves, so that what is refused at the door gets a status of its own.
        first = await _or_failure(call, anext(answers))
        return EventStream(_events(call, first, answers))

    @app.get("/outrider/v1/status", include_in_schema=False)
    async def status() -> Response:
        call = RpcCall()
        return _json(await _or_failure(call, rpcs.GetServerStatus(pb.GetServerStatusRequest(), call)))

    @app.get("/outrider/v1/model", include_in_schema=False)
    async def model() -> Response:
        call = RpcCall()
        return _json(await _or_failure(call, rpcs.GetModelInfo(pb.GetModelInfoRequest(), call)))

    @app.post("/outrider/v1/token_texts", include_in_schema=False)
    async def texts(request: Request) -> Response:
        ids = to_token_ids(await read_json_object(request, max_request_bytes))
        try:
            known = await token_texts(ids)
        except Exception as error:  # noqa: BLE001 - the kind of a replica's error is known once it is unpacked
            raise HttpError(failure_of(error, "token_texts")) from None
        return JSONResponse({"texts": known}, headers=_UNCACHED)


def to_message(body: dict[str, Any], message: _Request) -> _Request:
    """Fill message in. Raises RequestError for fields it does not have and values that do not fit."""
    try:
        json_format.ParseDict(body, message)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise RequestError("body", " ".join(str(error).split()).rstrip("."), "change the request") from None
    return message


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


async def _events(
    call: RpcCall, first: pb.GenerateStreamResponse, answers: AsyncGenerator[pb.GenerateStreamResponse, None]
) -> AsyncGenerator[str, None]:
    async with aclosing(answers):
        yield event(_compact(first))
        try:
            async for answer in answers:
                yield event(_compact(answer))
        except RuntimeError:
            if (failure := call.failure()) is None:
                raise
            yield event(json.dumps(failure.body()))
    yield DONE


async def _or_failure(call: RpcCall, answer: Awaitable[_Answer]) -> _Answer:
    """Raises HttpError for an error that the RPC told its context; the ingress then ends with a RuntimeError."""
    try:
        return await answer
    except RuntimeError:
        if (failure := call.failure()) is None:
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
