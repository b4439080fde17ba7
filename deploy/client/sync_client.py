"""The synchronous Python client of ``outrider.v1.GenerationService``; ``async_client`` has its asyncio twin.

    with OutriderClient("127.0.0.1:9000") as client:
        print(client.generate("def fib(n):", temperature=0.0, max_tokens=64).text)
        print(client.chat([{"role": "user", "content": "Hello!"}]).text)
        with client.stream("Once upon a time") as rounds:
            for message in rounds:
                print(message.text_delta, end="")

Answers are the API's own messages. A call that fails raises OutriderError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from outrider.deploy.client import calls
from outrider.deploy.client.attempts import Attempts, Balancer, RetryPolicy
from outrider.deploy.client.calls import (
    CONTROL_TIMEOUT_S,
    DEFAULT_ADDRESS,
    PROBE_S,
    Call,
    Pairs,
    Servers,
    Stubs,
    may_be_absent,
)
from outrider.deploy.client.error import Failed, FieldViolation, OutriderError, closed
from outrider.deploy.client.request import ChatOptions, ChatPrompt, GenerationOptions, TokenizeOptions, build_request
from outrider.v1 import generation_pb2 as pb

__all__ = [
    "DEFAULT_ADDRESS",
    "ChatOptions",
    "ChatPrompt",
    "CompletionStream",
    "FieldViolation",
    "GenerationOptions",
    "OutriderClient",
    "OutriderError",
    "TokenizeOptions",
    "build_request",
]

Response = TypeVar("Response")


class CompletionStream(Iterator[pb.GenerateStreamResponse]):
    """The messages of one request, one a round and answer. Closing it before its end cancels the request on the
    server; so does leaving its ``with`` block, and losing the last reference to it."""

    def __init__(self, client: OutriderClient, call: Call[pb.GenerateStreamResponse]) -> None:
        self._client, self._pending = client, call
        self._attempts = client._attempts(call)
        self._closed = threading.Event()
        self._settled = False  # output has been seen, or the call has failed: there is no other attempt
        self._open()

    def __next__(self) -> pb.GenerateStreamResponse:
        while True:
            try:
                message: pb.GenerateStreamResponse = next(self._call)
            except StopIteration:
                self._attempts.succeeded(self._call.trailing_metadata())
                raise
            except grpc.RpcError as error:
                if self._closed.is_set():
                    raise StopIteration from None
                failed = Failed(error, self._pending.request_id)
                delay_s = self._attempts.failed(failed.failure, failed.trailing, final=self._settled)
                if delay_s is None:
                    self._settled = True
                    raise self._client._explained(failed.failure, self._server) from None
                if self._closed.wait(delay_s):
                    raise StopIteration from None
                self._open()
            else:
                self._settled = True
                return message

    def close(self) -> None:
        """Cancel the request, unless it has ended. Iterating then stops; may be called from another thread."""
        self._closed.set()
        self._call.cancel()
        self._attempts.abandoned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def _open(self) -> None:
        self._server, left_s = self._attempts.begin()
        method = self._client._stubs[self._server].method(self._pending.rpc)
        self._call = self._client._send(method, self._pending, left_s)
        if self._closed.is_set():  # meanwhile, by another thread
            self._call.cancel()


class OutriderClient:
    """A client of one server, or of several that serve the same model; may be shared by threads.

    address: ``host:port``, or a list of them: each call goes to the server with the fewest requests.
    api_key: what the server's operator gave out; None: OUTRIDER_API_KEY of the environment, if it is set.
    application: name of the Serve application, needed only when a server runs several.
    credentials: ``grpc.ssl_channel_credentials(...)`` for a server that speaks TLS; None sends in the clear.
    metadata: sent with every call, such as what a gateway asks for.
    retries: further attempts of a call that failed with UNAVAILABLE, or with RESOURCE_EXHAUSTED and the server's word
    when to come again, before its first message. 0, the default: none.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        application: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Pairs = (),
        retries: int = 0,
    ) -> None:
        self._policy = RetryPolicy(retries)
        self._servers = Servers.of(address, application, metadata, credentials, api_key)
        self._channels = [self._servers.channel(number, grpc) for number in range(len(self._servers.addresses))]
        self._stubs = [Stubs(channel) for channel in self._channels]
        self._balancer = Balancer(len(self._channels))
        self._closed = threading.Event()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> pb.GenerateResponse:
        """The whole answer to a text or to token ids; with n above 1 all are in completions. Raises OutriderError.

        An exception that interrupts the wait, KeyboardInterrupt included, cancels the request.
        """
        return self._unary(calls.generate(prompt, options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> CompletionStream:
        """The answer round by round; with n above 1 those of all, told apart by index. Iterating raises
        OutriderError."""
        return CompletionStream(self, calls.stream(prompt, options))

    def chat(self, messages: ChatPrompt, **options: Unpack[ChatOptions]) -> pb.GenerateResponse:
        """The whole answer to a conversation, put into the model's chat template. Raises OutriderError."""
        return self._unary(calls.chat(messages, options))

    def stream_chat(self, messages: ChatPrompt, **options: Unpack[ChatOptions]) -> CompletionStream:
        """The same round by round."""
        return CompletionStream(self, calls.stream_chat(messages, options))

    def tokenize(
        self,
        prompt: str | ChatPrompt,
        *,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        **options: Unpack[TokenizeOptions],
    ) -> pb.TokenizeResponse:
        """The tokens of a text or a conversation: what generation makes of the same prompt. Raises OutriderError."""
        return self._unary(calls.tokenize(prompt, options, timeout_s))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> pb.DetokenizeResponse:
        """The text of tokens. Raises OutriderError."""
        return self._unary(calls.detokenize(token_ids, skip_special_tokens, model, timeout_s))

    def abort(self, request_id: str, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """End a request; where there are keys, one of this client's. Every server is asked. Returns whether one had it,
        running or waiting.

        Raises OutriderError when none had it and one did not answer.
        """
        failure: OutriderError | None = None
        for server in range(len(self._channels)):
            call = calls.abort(request_id, timeout_s)
            try:
                if self._once(server, call, call.timeout_s)[0].aborted:
                    return True
            except Failed as failed:
                failure = self._explained(failed.failure, server)
        if failure is not None:
            raise failure
        return False

    def status(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetServerStatusResponse:
        """What is served and how speculation is doing, at the replica that answers. Raises OutriderError."""
        return self._unary(calls.status(timeout_s))

    def revert_drafter(self, version: int, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> int:
        """Have a former version of a drafter that learns serve again; status() lists them. Returns the number that it
        serves under from now on. Raises OutriderError."""
        return int(self._unary(calls.revert_drafter(version, timeout_s)).serving)

    def model_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetModelInfoResponse:
        """What is served: what stays the same as long as the server runs. Raises OutriderError."""
        return self._unary(calls.model_info(timeout_s))

    def server_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetServerInfoResponse:
        """Versions and start time. Raises OutriderError."""
        return self._unary(calls.server_info(timeout_s))

    def healthy(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """Whether requests can be sent now: grpc.health.v1 says SERVING. Of several servers one is enough.

        False when none can be reached in time. Raises OutriderError for any other failure.
        """
        return any(self._serves(server, timeout_s) for server in range(len(self._channels)))

    def close(self) -> None:
        """Close the connections; calls under way are cancelled."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _attempts(self, call: Call[Any]) -> Attempts:
        return Attempts(call, self._policy, self._balancer)

    def _send(self, method: Any, call: Call[Any], timeout_s: float | None) -> Any:
        try:
            return method(call.request, timeout=timeout_s, metadata=self._servers.metadata)
        except ValueError:
            if self._closed.is_set():  # gRPC's word for a closed channel
                raise closed() from None
            raise

    def _unary(self, call: Call[Response]) -> Response:
        attempts = self._attempts(call)
        try:
            while True:
                server, left_s = attempts.begin()
                try:
                    response, trailing = self._once(server, call, left_s)
                except Failed as failed:
                    delay_s = attempts.failed(failed.failure, failed.trailing)
                    if delay_s is None or self._closed.wait(delay_s):
                        raise self._explained(failed.failure, server) from None
                else:
                    attempts.succeeded(trailing)
                    return response
        finally:
            attempts.abandoned()  # interrupted

    def _once(self, server: int, call: Call[Response], timeout_s: float | None) -> tuple[Response, Any]:
        """(response, trailing metadata). Raises Failed."""
        sent = self._send(self._stubs[server].method(call.rpc).future, call, timeout_s)
        try:
            return sent.result(), sent.trailing_metadata()
        except grpc.RpcError as error:
            raise Failed(error, call.request_id) from None
        except grpc.FutureCancelledError:
            raise closed() from None
        finally:
            sent.cancel()  # an interrupted wait must not leave the server working; no effect on a finished call

    def _serves(self, server: int, timeout_s: float | None) -> bool:
        call = calls.health(timeout_s)
        try:
            return calls.serves(self._once(server, call, timeout_s)[0])
        except Failed as failed:
            if calls.means_not_serving(failed.failure):
                return False
            raise failed.failure from None

    def _explained(self, error: OutriderError, server: int) -> OutriderError:
        if may_be_absent(error) and not self._reachable(server):
            return self._servers.explained(error, server)
        return error

    def _reachable(self, server: int) -> bool:
        try:
            grpc.channel_ready_future(self._channels[server]).result(timeout=PROBE_S)
        except grpc.FutureTimeoutError:
            return False
        return True
