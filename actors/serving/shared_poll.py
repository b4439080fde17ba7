"""One question to the replicas for all who ask the same within a moment: health, and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

APART_S = 0.25
"""The replicas are asked so seldom at most. Who asks in between waits for the next time."""

T = TypeVar("T")


class SharedPoll(Generic[T]):
    """For one event loop. An answer is never older than the question."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """ask: within a time of its own."""
        self._ask, self._clock = ask, clock
        self._next: asyncio.Task[T] | None = None
        self._asked_s = float("-inf")

    async def __call__(self) -> T:
        """Raises what asking raises. Who gives up waiting ends it for nobody else."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._answer())
            self._next.add_done_callback(_seen)
        return await asyncio.shield(self._next)

    async def _answer(self) -> T:
        await asyncio.sleep(self._asked_s + APART_S - self._clock())
        self._next, self._asked_s = None, self._clock()
        return await self._ask()


def _seen(task: asyncio.Task[T]) -> None:
    """Whoever asked may have left: an error is then nobody's."""
    if not task.cancelled():
        task.exception()
