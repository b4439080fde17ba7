"""One question to the replicas for all who ask the same within a moment: health, and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

FRESH_S = 0.25
"""An answer is given to whoever asks within this."""

T = TypeVar("T")


class SharedPoll(Generic[T]):
    """For one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """ask: within a time of its own."""
        self._ask, self._clock = ask, clock
        self._asking: asyncio.Task[T] | None = None
        self._answered_s = float("-inf")

    async def __call__(self) -> T:
        """The answer, at most FRESH_S old. Raises what asking raises. Who gives up waiting ends it for nobody else."""
        asking = self._asking
        if asking is None or (asking.done() and self._clock() - self._answered_s >= FRESH_S):
            asking = self._asking = asyncio.ensure_future(self._answer())
            asking.add_done_callback(_seen)
        return await asyncio.shield(asking)

    async def _answer(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_s = self._clock()


def _seen(task: asyncio.Task[T]) -> None:
    """Whoever asked may have left: an error is then nobody's."""
    if not task.cancelled():
        task.exception()
