"""Provides the asyncio client of ``outrider.v1.GenerationService``, with the methods of OutriderClient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import wraps
from typing import Any, Concatenate, Unpack

import grpc.aio

from outrider.deploy.client import requests
from outrider.deploy.client.requests import Answer, Call, GenerationOptions, OutriderError, P, Prompt
from outrider.deploy.client.sync_client import GrpcClient
from outrider.v1 import generation_pb2 as pb


class AsyncCompletionStream(
    AsyncIterator[pb.GenerateStreamResponse], AbstractAsyncContextManager["AsyncCompletionStream"]
):
    """Iterates over the messages of one request, one per round and answer.

    Closing it before its end cancels the request on the server; so does leaving its ``async with`` block, cancelling
    the task that waits, and losing the last reference.
    """

    def __init__(self, client: AsyncMethods, call: Call[pb.GenerateStreamResponse], sent: Any) -> None:
        self._client, self._call, self._sent, self._closed = client, call, sent, False

    async def __anext__(self) -> pb.GenerateStreamResponse:
        try:
            message = grpc.aio.EOF if self._closed else await self._client._call(self._call, self._sent.read())
        except OutriderError:
            if not self._closed:
                raise
            message = grpc.aio.EOF
        if message is not grpc.aio.EOF:
            return message
        self._closed = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended. Iterating then stops."""
        self._closed = True
        self._sent.cancel()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._sent.cancel()


def _unary(build: Callable[P, Call[Answer]]) -> Callable[Concatenate[AsyncMethods, P], Coroutine[Any, Any, Answer]]:
    return wraps(build)(lambda client, *args, **options: client._call(build(*args, **options)))


class AsyncMethods:
    """Has the methods of the API for asyncio. Cancelling the task that awaits one cancels the call on the server."""

    _send: Callable[..., Any]  # returns an object like grpc.aio's calls
    _fail: Callable[[Any, Call[Any]], Any]

    generate = _unary(requests.generate)
    tokenize = _unary(requests.tokenize)
    detokenize = _unary(requests.detokenize)
    abort = _unary(requests.abort)
    status = _unary(requests.status)
    revert_drafter = _unary(requests.revert_drafter)
    model_info = _unary(requests.model_info)
    healthy = _unary(requests.healthy)

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncCompletionStream:
        """Return the messages of the answers, told apart by index where n is above 1. Not awaited itself."""
        call = requests.stream(prompt, options)
        return AsyncCompletionStream(self, call, self._send(call))

    async def _call(self, call: Call[Any], response: Awaitable[Any] | None = None) -> Any:
        """Sends a call and returns its answer. response: of a call that was sent before."""
        awaited = self._send(call) if response is None else response
        try:
            return call.answer(await awaited)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise OutriderError(grpc.StatusCode.CANCELLED, "the client was closed") from None
        except Exception as error:  # noqa: BLE001 - callers handle one kind of error, whatever Serve raises
            return self._fail(error, call)


class AsyncOutriderClient(GrpcClient, AsyncMethods, AbstractAsyncContextManager["AsyncOutriderClient"]):
    __doc__ = f"{GrpcClient.__doc__}\n    For the tasks of one event loop, the one that runs at its first call."

    _transport = grpc.aio

    async def close(self) -> None:
        """Close the connections; calls under way are cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
