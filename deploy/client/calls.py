"""The calls of the API as values (the RPC, its request, how long it may take), and the servers that they are sent to:
what every client shares."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.deploy.client.error import OutriderError, invalid
from outrider.deploy.client.request import (
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
from outrider.v1 import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
"""In the environment: the key of clients that are given none."""

PROBE_S = 1.0
"""How long an address that did not answer gets to prove that something listens there."""

Pairs = Sequence[tuple[str, str | bytes]]

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


def revert_drafter(version: int, timeout_s: float | None) -> Call[pb.RevertDrafterResponse]:
    try:
        return Call("RevertDrafter", pb.RevertDrafterRequest(version=version), timeout_s)
    except (TypeError, ValueError) as error:
        raise invalid("version", f"not a value this field can hold: {error}") from None


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


@dataclass(frozen=True)
class Servers:
    """addresses: ``host:port`` each, of servers that serve the same model. credentials: None sends in the clear."""

    addresses: tuple[str, ...]
    metadata: tuple[tuple[str, str | bytes], ...]
    credentials: grpc.ChannelCredentials | None

    @classmethod
    def of(
        cls,
        address: str | Sequence[str],
        application: str | None,
        metadata: Pairs,
        credentials: grpc.ChannelCredentials | None,
        api_key: str | None = None,
    ) -> Servers:
        """api_key None: what OUTRIDER_API_KEY holds, if anything. Raises ValueError for no address, and for what cannot
        be a key."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        if not addresses or not all(addresses):
            raise ValueError("address: is empty; send host:port, or a list of them")
        named = (("application", application),) if application else ()
        return cls(addresses, (*named, *_shown_key(api_key, metadata), *metadata), credentials)

    def channel(self, number: int, transport: Any) -> Any:
        """A channel to one of them. transport: ``grpc`` or ``grpc.aio``."""
        address = self.addresses[number]
        if self.credentials is None:
            return transport.insecure_channel(address, options=_channel_options(address))
        return transport.secure_channel(address, self.credentials, options=_channel_options(address))

    def explained(self, error: OutriderError, number: int) -> OutriderError:
        """UNAVAILABLE from where nothing listens, in words that help."""
        over, other = ("", "with") if self.credentials is None else (" over TLS", "without")
        found = f"no server answers{over} at {self.addresses[number]}"
        fix = f"start one with 'outrider serve', or ask {other} TLS"
        return OutriderError(error.code, f"{found}; {fix}", request_id=error.request_id)


def _shown_key(api_key: str | None, metadata: Pairs) -> Pairs:
    """What metadata says of itself counts."""
    if any(name.lower() == "authorization" for name, _ in metadata):
        return ()
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not key:
        return ()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"api_key, or {API_KEY_VARIABLE}: has characters that no key has; give what was printed")
    return (("authorization", f"Bearer {key}"),)


class Stubs:
    """The callables of every service on one channel, by the name of the RPC."""

    def __init__(self, channel: Any) -> None:
        self._stubs = (rpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel))

    def method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))


def may_be_absent(error: OutriderError) -> bool:
    """Whether the error could mean that no server of ours has answered."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.reason is None


def _channel_options(address: str) -> list[tuple[str, int]]:
    # A proxy named in the environment is for the way out of this machine.
    options = [("grpc.enable_http_proxy", 0)] if _is_loopback(address) else []
    # Log-probabilities of a long prompt are more than gRPC takes by default.
    return [*options, ("grpc.max_receive_message_length", -1)]


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
