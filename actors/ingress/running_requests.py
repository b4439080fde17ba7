"""The requests that an ingress replica holds, and how one of them is ended from outside. No Ray, no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from actors.generation import GenerationRequest, RoundOutput, Usage


class RunningRequest:
    """What has come of one request so far. Its outputs are read by one task."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._reader: asyncio.Task[None] | None = None
        """The task that waits for the next output, while it does."""

        self._completion_tokens = [0] * request.num_answers
        self._usage = Usage(0, 0)
        self.unfinished = set(range(request.num_answers))
        self.aborted = False

    async def next(self, outputs: AsyncGenerator[RoundOutput, None]) -> RoundOutput | None:
        """The next output; None at the end, or when the request was aborted. Raises TimeoutError at its deadline."""
        if self.aborted:
            return None
        self._reader = asyncio.current_task()
        try:
            async with asyncio.timeout(self._request.seconds_left()):
                return await anext(outputs, None)
        except asyncio.CancelledError:
            if not self.aborted or self._reader is None or self._reader.uncancel():
                raise  # by somebody else, too
            return None
        finally:
            self._reader = None

    def note(self, output: RoundOutput) -> None:
        """Raises RuntimeError for an answer that is over or unknown."""
        if output.index not in self.unfinished:
            raise RuntimeError(f"the target sent a round of answer {output.index}, which is over or unknown")
        if output.finish_reason is not None:
            self.unfinished.remove(output.index)
        self._completion_tokens[output.index] += len(output.token_ids)
        self._usage = output.usage or self._usage

    def abort(self) -> None:
        self.aborted = True
        if self._reader is not None:
            self._reader.cancel()

    def aborted_outputs(self) -> list[RoundOutput]:
        """The ends of the answers that have none. The prompt is counted as far as its tokens are known here."""
        return [
            RoundOutput(
                "",
                (),
                "abort",
                usage=Usage(self._usage.prompt_tokens, self._completion_tokens[index], self._usage.cached_tokens),
                index=index,
            )
            for index in sorted(self.unfinished)
        ]


class RunningRequests:
    """By request id. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}

    @contextmanager
    def hold(self, request: GenerationRequest) -> Iterator[RunningRequest]:
        running = self._requests[request.request_id] = RunningRequest(request)
        try:
            yield running
        finally:
            del self._requests[request.request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def abort(self, request_id: str) -> bool:
        """Whether it is held here."""
        if (running := self._requests.get(request_id)) is None:
            return False
        running.abort()
        return True
