"""The asynchronous methods of the API, by whatever way the calls travel: AsyncOutriderClient and OutriderHandle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

from deploy.client import calls
from deploy.client.calls import CONTROL_TIMEOUT_S, Call
from deploy.client.request import ChatOptions, ChatPrompt, GenerationOptions, TokenizeOptions
from outrider.v1 import generation_pb2 as pb

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
    """Every method raises OutriderError. Cancelling the task that awaits one cancels the call on the server."""

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

    async def model_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetModelInfoResponse:
        """What is served: what stays the same as long as the server runs."""
        return await self._unary(calls.model_info(timeout_s))

    async def server_info(self, *, timeout_s: float | None = CONTROL_TIMEOUT_S) -> pb.GetServerInfoResponse:
        """Versions and start time."""
        return await self._unary(calls.server_info(timeout_s))
