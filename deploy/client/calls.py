"""The calls of the API as values: the RPC, its request, how long it may take. What every client shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from deploy.client.error import OutriderError, invalid
from deploy.client.request import (
    ChatOptions,
    ChatPrompt,
    GenerationOptions,
    TokenizeOptions,
    build_chat_request,
    build_detokenize_request,
    build_request,
    build_tokenize_request,
)
from outrider.v1 import generation_pb2 as pb

CONTROL_TIMEOUT_S = 10.0
"""Default for calls that generate nothing."""

SERVICE = "outrider.v1.GenerationService"

_NOT_SERVING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)

Response = TypeVar("Response")


@dataclass(frozen=True)
class Call(Generic[Response]):
    """One call before it is sent. timeout_s: seconds for all of it, retries included; None: no limit."""

    rpc: str
    request: Any
    timeout_s: float | None

    @property
    def request_id(self) -> str | None:
        """None: the server chooses, or the call has none."""
        return getattr(self.request, "request_id", "") or None


def generate(prompt: str | Sequence[int], options: GenerationOptions) -> Call[pb.GenerateResponse]:
    return Call("Generate", build_request(pb.GenerateRequest(), prompt, options), options.get("timeout_s"))


def stream(prompt: str | Sequence[int], options: GenerationOptions) -> Call[pb.GenerateStreamResponse]:
    return Call("GenerateStream", build_request(pb.GenerateStreamRequest(), prompt, options), options.get("timeout_s"))


def chat(messages: ChatPrompt, options: ChatOptions) -> Call[pb.GenerateResponse]:
    return Call("Generate", build_chat_request(pb.GenerateRequest(), messages, options), options.get("timeout_s"))


def stream_chat(messages: ChatPrompt, options: ChatOptions) -> Call[pb.GenerateStreamResponse]:
    request = build_chat_request(pb.GenerateStreamRequest(), messages, options)
    return Call("GenerateStream", request, options.get("timeout_s"))


def tokenize(prompt: str | ChatPrompt, options: TokenizeOptions, timeout_s: float | None) -> Call[pb.TokenizeResponse]:
    return Call("Tokenize", build_tokenize_request(prompt, options), timeout_s)


def detokenize(
    token_ids: Sequence[int], skip_special_tokens: bool | None, model: str | None, timeout_s: float | None
) -> Call[pb.DetokenizeResponse]:
    return Call("Detokenize", build_detokenize_request(token_ids, skip_special_tokens, model), timeout_s)


def abort(request_id: str, timeout_s: float | None) -> Call[pb.AbortRequestResponse]:
    try:
        return Call("AbortRequest", pb.AbortRequestRequest(request_id=request_id), timeout_s)
    except (TypeError, ValueError) as error:
        raise invalid("request_id", f"not a value this field can hold: {error}") from None


def status(timeout_s: float | None) -> Call[pb.GetServerStatusResponse]:
    return Call("GetServerStatus", pb.GetServerStatusRequest(), timeout_s)


def model_info(timeout_s: float | None) -> Call[pb.GetModelInfoResponse]:
    return Call("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)


def server_info(timeout_s: float | None) -> Call[pb.GetServerInfoResponse]:
    return Call("GetServerInfo", pb.GetServerInfoRequest(), timeout_s)


def health(timeout_s: float | None) -> Call[health_pb2.HealthCheckResponse]:
    return Call("Check", health_pb2.HealthCheckRequest(service=SERVICE), timeout_s)


def serves(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def means_not_serving(error: OutriderError) -> bool:
    """Of a health check: whether its failure says that no request can be sent now. NOT_FOUND: the server is up and has
    no such service yet."""
    return error.code in _NOT_SERVING
