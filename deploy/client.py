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
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from deploy.client_request import GenerationOptions, OutriderError, build_request
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

DEFAULT_ADDRESS = "127.0.0.1:9000"

_PROBE_S = 1.0


class CompletionStream(Iterator[pb.GenerateStreamResponse]):
    """The messages of one request, one a round and answer. Closing it before its end cancels the request on the
    server."""

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
        # Log-probabilities of a long prompt are more than gRPC takes by default.
        options.append(("grpc.max_receive_message_length", -1))
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = rpc.GenerationServiceStub(self._channel)
        self._metadata = (("application", application),) if application else ()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> pb.GenerateResponse:
        """The whole answer to a text or to token ids; with n above 1 all are in completions. Raises OutriderError.

        An exception that interrupts the wait, KeyboardInterrupt included, cancels the request.
        """
        request = build_request(pb.GenerateRequest(), prompt, options)
        return self._unary(self._stub.Generate, request, options.get("timeout_s"))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> CompletionStream:
        """The answer round by round; with n above 1 those of all, told apart by index. Iterating raises
        OutriderError."""
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


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
