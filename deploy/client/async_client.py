"""The asyncio client of ``outrider.v1.GenerationService``: methods, options and answers of OutriderClient.

async with AsyncOutriderClient("127.0.0.1:9000") as client:
    print((await client.generate("def fib(n):", temperature=0.0, max_tokens=64)).text)
    async with client.stream("Once upon a time") as rounds:
        async for message in rounds:
            print(message.text_delta, end="")
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

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
from outrider.deploy.client.error import Failed, OutriderError, closed
from outrider.deploy.client.request import ChatOptions, ChatPrompt, GenerationOptions, TokenizeOptions
from outrider.v1 import generation_pb2 as pb

__all__ = ["AsyncCompletionStream", "AsyncMethods", "AsyncOutriderClient", "OutriderError"]

Response = TypeVar("Response")


class AsyncCompletionStream(AsyncIterator[pb.GenerateStreamResponse], ABC):
    """The messages of one request, one a round and answer.

    Closing it before its end cancels the request on the server; so does leaving its ``async with`` block, cancelling
    the task that waits for a message, and losing the last reference to it.
    """

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel the request, unless it has ended. Iterating then stops."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncMethods(ABC):
    """The methods of the API, by whatever way the calls travel: AsyncOutriderClient and OutriderHandle.

    Every method raises OutriderError. Cancelling the task that awaits one cancels the call on the server.
    """

    @abstractmethod
    async def _unary(self, call: Call[Response]) -> Response: ...

    @abstractmethod
    def _rounds(self, call: Call[pb.GenerateStreamResponse]) -> AsyncCompletionStream: ...

    @abstractmethod
    async def healthy(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """Whether requests can be sent now."""

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> pb.GenerateResponse:
        """The whole answer to a text or to token ids; with n above 1 all are in completions."""
        return await self._unary(calls.generate(prompt, options))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> AsyncCompletionStream:
        """The answer round by round; with n above 1 those of all, told apart by index. Not awaited itself."""
        return self._rounds(calls.stream(prompt, options))

    async def chat(self, messages: ChatPrompt, **options: Unpack[ChatOptions]) -> pb.GenerateResponse:
        """The whole answer to a conversation, put into the model's chat template."""
        return await self._unary(calls.chat(messages, options))

    def stream_chat(self, messages: ChatPrompt, **options: Unpack[ChatOptions]) -> AsyncCompletionStream:
        """The same round by round. Not awaited itself."""
        return self._rounds(calls.stream_chat(messages, options))

    async def tokenize(
        self,
        prompt: str | ChatPrompt,
        *,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
        **options: Unpack[TokenizeOptions],
    ) -> pb.TokenizeResponse:
        """The tokens of a text or a conversation: what generation makes of the same prompt."""
        return await self._unary(calls.tokenize(prompt, options, timeout_s))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> pb.DetokenizeResponse:
        """The text of tokens."""
        return await self._unary(calls.detokenize(token_ids, skip_special_tokens, model, timeout_s))

    async def abort(self, request_id: str, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """End a request, whoever sent it. Returns whether it was there, running or waiting."""
        return (await self._unary(calls.abort(request_id, timeout_s))).aborted

    async def status(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetServerStatusResponse:
        """What is served and how speculation is doing, at the replica that answers."""
        return await self._unary(calls.status(timeout_s))

    async def revert_drafter(self, version: int, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> int:
        """Have a former version of a drafter that learns serve again; status() lists them. Returns the number that it
        serves under from now on."""
        return int((await self._unary(calls.revert_drafter(version, timeout_s))).serving)

    async def model_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetModelInfoResponse:
        """What is served: what stays the same as long as the server runs."""
        return await self._unary(calls.model_info(timeout_s))

    async def server_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetServerInfoResponse:
        """Versions and start time."""
        return await self._unary(calls.server_info(timeout_s))


class AsyncOutriderClient(AsyncMethods):
    """A client of one server, or of several that serve the same model; for the tasks of one event loop, the one that
    runs at its first call. Parameters are those of OutriderClient."""

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
        self._balancer = Balancer(len(self._servers.addresses))
        self._channels: list[Any] = []
        self._stubs: list[Stubs] = []
        self._closed = False

    async def abort(self, request_id: str, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """End a request; where there are keys, one of this client's. Every server is asked. Returns whether one had it,
        running or waiting.

        Raises OutriderError when none had it and one did not answer.
        """

        async def ask(server: int) -> bool | OutriderError:
            try:
                return (await self._once(server, calls.abort(request_id, timeout_s), timeout_s))[0].aborted
            except Failed as failed:
                return await self._explained(failed.failure, server)

        answers = await asyncio.gather(*map(ask, range(len(self._servers.addresses))))
        failures = [answer for answer in answers if isinstance(answer, OutriderError)]
        if failures and not any(answer is True for answer in answers):
            raise failures[0]
        return any(answer is True for answer in answers)

    async def healthy(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> bool:
        """Whether requests can be sent now: grpc.health.v1 says SERVING. Of several servers one is enough.

        False when none can be reached in time. Raises OutriderError for any other failure.
        """

        async def serves(server: int) -> bool:
            try:
                return calls.serves((await self._once(server, calls.health(timeout_s), timeout_s))[0])
            except Failed as failed:
                if calls.means_not_serving(failed.failure):
                    return False
                raise failed.failure from None

        return any(await asyncio.gather(*map(serves, range(len(self._servers.addresses)))))

    async def close(self) -> None:
        """Close the connections; calls under way are cancelled."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(self, call: Call[Response]) -> Response:
        attempts = self._attempts(call)
        try:
            while True:
                server, left_s = attempts.begin()
                try:
                    response, trailing = await self._once(server, call, left_s)
                except Failed as failed:
                    delay_s = attempts.failed(failed.failure, failed.trailing)
                    if delay_s is None:
                        raise await self._explained(failed.failure, server) from None
                    await asyncio.sleep(delay_s)
                else:
                    attempts.succeeded(trailing)
                    return response
        finally:
            attempts.abandoned()  # cancelled

    def _rounds(self, call: Call[pb.GenerateStreamResponse]) -> AsyncCompletionStream:
        return _Rounds(self, call)

    def _attempts(self, call: Call[Any]) -> Attempts:
        return Attempts(call, self._policy, self._balancer)

    def _send(self, server: int, call: Call[Any], timeout_s: float | None) -> Any:
        if self._closed:
            raise closed()
        if not self._channels:  # not before: a channel belongs to the loop that runs when it is made
            self._channels = [self._servers.channel(number, grpc.aio) for number in range(len(self._servers.addresses))]
            self._stubs = [Stubs(channel) for channel in self._channels]
        method = self._stubs[server].method(call.rpc)
        return method(call.request, timeout=timeout_s, metadata=self._servers.metadata)

    async def _once(self, server: int, call: Call[Response], timeout_s: float | None) -> tuple[Response, Any]:
        """(response, trailing metadata). Raises Failed."""
        sent = self._send(server, call, timeout_s)
        try:
            return await sent, await sent.trailing_metadata()
        except grpc.aio.AioRpcError as error:
            raise Failed(error, call.request_id) from None
        except asyncio.CancelledError:
            if self._closed and not _task_is_cancelled():
                raise closed() from None
            raise

    async def _explained(self, error: OutriderError, server: int) -> OutriderError:
        if may_be_absent(error) and not self._closed:
            try:
                await asyncio.wait_for(self._channels[server].channel_ready(), PROBE_S)
            except TimeoutError:
                return self._servers.explained(error, server)
        return error


class _Rounds(AsyncCompletionStream):
    def __init__(self, client: AsyncOutriderClient, call: Call[pb.GenerateStreamResponse]) -> None:
        self._client, self._pending = client, call
        self._attempts = client._attempts(call)
        self._closed = False
        self._settled = False  # output has been seen, or the call has failed: there is no other attempt
        self._open()

    async def __anext__(self) -> pb.GenerateStreamResponse:
        while True:
            if self._closed:
                raise StopAsyncIteration
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                failed = Failed(error, self._pending.request_id)
                delay_s = self._attempts.failed(failed.failure, failed.trailing, final=self._settled)
                if delay_s is None:
                    self._settled = True
                    raise await self._client._explained(failed.failure, self._server) from None
                await asyncio.sleep(delay_s)
                if not self._closed:
                    self._open()
            except asyncio.CancelledError:
                self._attempts.abandoned()
                if _task_is_cancelled():
                    raise
                if self._closed:
                    raise StopAsyncIteration from None
                if self._client._closed:
                    raise closed() from None
                raise
            else:
                if message is grpc.aio.EOF:
                    self._attempts.succeeded(await self._call.trailing_metadata())
                    self._closed = True
                    raise StopAsyncIteration
                self._settled = True
                return message

    async def aclose(self) -> None:
        self._closed = True
        self._cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._cancel()

    def _cancel(self) -> None:
        self._call.cancel()
        self._attempts.abandoned()

    def _open(self) -> None:
        self._server, left_s = self._attempts.begin()
        self._call = self._client._send(self._server, self._pending, left_s)


def _task_is_cancelled() -> bool:
    """Whether somebody asked the present task to end, rather than gRPC telling of a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
