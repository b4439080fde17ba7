"""A small synchronous Python client of ``outrider.v1.GenerationService``.

    with OutriderClient("127.0.0.1:9000") as client:
        print(client.generate("def fib(n):", temperature=0.0, max_tokens=64).text)
        with client.stream("Once upon a time") as rounds:
            for message in rounds:
                print(message.text_delta, end="")

Answers are the API's own messages. A call that fails raises OutriderError.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"

_PROBE_S = 1.0
_REQUEST_FIELDS = ("request_id", "model", "apply_chat_template")
_SPECULATION_FIELDS = {"speculation": "enabled", "num_speculative_tokens": "num_speculative_tokens"}

_Request = TypeVar("_Request", pb.GenerateRequest, pb.GenerateStreamRequest)


class GenerationOptions(TypedDict, total=False):
    """Everything about a request but its prompt. What is left out, or None, the server decides.

    Limits and defaults are those of the fields of the same name in ``generation.proto``.
    """

    request_id: str | None
    model: str | None
    apply_chat_template: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    speculation: bool | None
    """False: decode without drafts."""

    num_speculative_tokens: int | None
    timeout_s: float | None
    """Seconds for the whole call, above 0. It is both the call's deadline and the engine's."""


class OutriderError(Exception):
    """A call that failed: with what status, and why."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class CompletionStream(Iterator[pb.GenerateStreamResponse]):
    """The messages of one answer, one a round. Closing it before its end cancels the request on the server."""

    def __init__(self, client: OutriderClient, call: Any) -> None:
        self._client, self._call = client, call
        self._closed = False

    def __next__(self) -> pb.GenerateStreamResponse:
        try:
            message: pb.GenerateStreamResponse = next(self._call)
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            raise self._client._failure(error) from None
        return message

    def close(self) -> None:
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class OutriderClient:
    """One connection; may be shared by threads.

    address: ``host:port``. application: name of the Serve application, needed only when the server runs several.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, application: str | None = None) -> None:
        self._address = address
        # A proxy named in the environment is for the way out of this machine.
        options = [("grpc.enable_http_proxy", 0)] if _is_loopback(address) else []
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = rpc.GenerationServiceStub(self._channel)
        self._metadata = (("application", application),) if application else ()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> pb.GenerateResponse:
        """The whole answer to a text or to token ids. Raises OutriderError.

        An exception that interrupts the wait, KeyboardInterrupt included, cancels the request.
        """
        request = build_request(pb.GenerateRequest(), prompt, options)
        return self._unary(self._stub.Generate, request, options.get("timeout_s"))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> CompletionStream:
        """The answer round by round. Iterating raises OutriderError."""
        request = build_request(pb.GenerateStreamRequest(), prompt, options)
        call = self._stub.GenerateStream(request, timeout=options.get("timeout_s"), metadata=self._metadata)
        return CompletionStream(self, call)

    def status(self, *, timeout_s: float | None = 10.0) -> pb.GetServerStatusResponse:
        """What is served and how speculation is doing. Raises OutriderError."""
        return self._unary(self._stub.GetServerStatus, pb.GetServerStatusRequest(), timeout_s)

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        call = method.future(request, timeout=timeout_s, metadata=self._metadata)
        try:
            return call.result()
        except grpc.RpcError as error:
            raise self._failure(error) from None
        except grpc.FutureCancelledError:
            raise OutriderError(grpc.StatusCode.CANCELLED, "the client was closed") from None
        finally:
            call.cancel()  # an interrupted wait must not leave the server working; no effect on a finished call

    def _failure(self, error: grpc.RpcError) -> OutriderError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNAVAILABLE and not self._reachable():
            return OutriderError(code, f"no server answers at {self._address}; start one with 'outrider serve'")
        return OutriderError(code, details)

    def _reachable(self) -> bool:
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_PROBE_S)
        except grpc.FutureTimeoutError:
            return False
        return True


def build_request(request: _Request, prompt: str | Sequence[int], options: GenerationOptions) -> _Request:
    """Fill in request. Raises OutriderError for a value its field cannot hold, TypeError for an unknown option."""
    remaining: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        request.token_ids.SetInParent()
        _put(request.token_ids, "ids", prompt, "token_ids")
    for name in _REQUEST_FIELDS:
        if name in remaining:
            _put(request, name, remaining.pop(name), name)
    for name, field in _SPECULATION_FIELDS.items():
        if name in remaining:
            _put(request.speculation, field, remaining.pop(name), f"speculation.{field}")
    if "timeout_s" in remaining:
        timeout_s = remaining.pop("timeout_s")
        if not 0 < timeout_s < math.inf:
            raise _invalid("timeout_s", f"{timeout_s} is not a time to wait; send a number of seconds above 0")
        _put(request, "timeout_ms", math.ceil(timeout_s * 1000), "timeout_ms")
    for name, value in remaining.items():
        if name not in pb.SamplingParameters.DESCRIPTOR.fields_by_name:
            raise TypeError(f"unknown option {name!r}; see GenerationOptions")
        if name == "stop" and isinstance(value, str):
            value = [value]
        _put(request.sampling, name, value, f"sampling.{name}")
    return request


def _put(message: Any, field: str, value: Any, public_name: str) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise _invalid(public_name, f"not a value this field can hold: {error}") from None


def _invalid(field: str, problem: str) -> OutriderError:
    """The error the server would answer with, for what cannot even be sent."""
    return OutriderError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {problem}")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
