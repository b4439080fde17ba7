"""The requests that an ingress holds: sent again when their replica is lost, and ended from outside.

A request that is lost with its replica before it has any output is given to another one: nobody has seen anything of
it yet. One that has begun is not: the client gets UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ray.serve.exceptions import BackPressureError

from outrider.actors.observability.metrics import METRICS
from outrider.actors.replica_calls import GenerationRequest, ReplicaLost, RoundOutput, Usage
from outrider.actors.request_ids import scoped_id
from outrider.actors.serving.draining import DRAIN, Drain
from outrider.actors.serving.failures import REPLICA_LOST, cause_of

logger = logging.getLogger("ray.serve.outrider.ingress")

QUEUE_PATIENCE_S = 30.0
"""How long a request that was admitted once, and lost its place with its replica, waits for room in the queue."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Call(Protocol):
    """A streaming call to a replica, as a DeploymentHandle makes it."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> None: ...


def retried(
    send: Callable[[tuple[str, ...]], Call],
    *,
    max_retries: int,
    request_id: str,
    has_begun: Callable[[Any], bool] = lambda message: True,
    drain: Drain = DRAIN,
) -> AsyncGenerator[Any, None]:
    """The messages of send(replicas to avoid), sent again when its replica is lost before it has begun.

    has_begun: whether a message is part of the answer. Earlier ones are held back until one is, or the stream ends.
    However this ends early, the call is cancelled: that is what makes the engine abort the request. Raises what the
    call raises, and Draining.
    """
    return drain.through(_retried(send, max_retries=max_retries, request_id=request_id, has_begun=has_begun))


async def _retried(
    send: Callable[[tuple[str, ...]], Call],
    *,
    max_retries: int,
    request_id: str,
    has_begun: Callable[[Any], bool],
) -> AsyncGenerator[Any, None]:
    avoid: tuple[str, ...] = ()
    retries, queue_pause_s, give_up = 0, _FIRST_PAUSE_S, 0.0
    while True:
        call = send(avoid)
        held: list[Any] = []
        begun = False
        try:
            async for message in call:
                held.append(message)
                begun = begun or has_begun(message)
                if begun:
                    for ready in held:
                        yield ready
                    held.clear()
            for ready in held:
                yield ready
            return
        except BaseException as error:
            call.cancel()
            if begun or not isinstance(error, Exception):
                raise
            lost = cause_of(error)
            if isinstance(lost, BackPressureError) and retries and time.monotonic() < give_up:
                await asyncio.sleep(queue_pause_s)
                queue_pause_s = min(2 * queue_pause_s, _LONGEST_PAUSE_S)
                continue
            if isinstance(lost, BackPressureError):
                METRICS.refused_generations("ingress")
            if not isinstance(lost, REPLICA_LOST) or retries == max_retries:
                raise
            retries, give_up = retries + 1, time.monotonic() + QUEUE_PATIENCE_S
            if isinstance(lost, ReplicaLost):
                avoid = (*avoid, lost.replica_id)
            logger.warning("request %s had no output yet when its replica was lost; sent again: %s", request_id, lost)


class RunningRequest:
    """What has come of one request so far. Its outputs are read by one task."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
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
            async with asyncio.timeout(self.request.seconds_left()):
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
    """By what engines call them. Not thread-safe."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}

    @contextmanager
    def hold(self, request: GenerationRequest) -> Iterator[RunningRequest]:
        running = self._requests[request.engine_id] = RunningRequest(request)
        try:
            yield running
        finally:
            del self._requests[request.engine_id]

    def __contains__(self, request: GenerationRequest) -> bool:
        """Whether its caller has one of the same id."""
        return request.engine_id in self._requests

    def abort(self, request_id: str, caller: int | None = None) -> bool:
        """That of caller, None: of whoever has one. Returns whether it is held here."""
        if caller is None:
            meant = [running for running in self._requests.values() if running.request.request_id == request_id]
        else:
            found = self._requests.get(scoped_id(caller, request_id))
            meant = [] if found is None else [found]
        for running in meant:
            running.abort()
        return bool(meant)
