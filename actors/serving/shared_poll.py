"""Asks the replicas once for all callers that ask the same within a moment: health, and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

APART_S = 0.25
"""Least time between two questions; callers in between share the next one."""

T = TypeVar("T")


class SharedPoll(Generic[T]):
    """For one event loop. An answer is never older than the call that returns it."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._next: asyncio.Task[T] | None = None
        self._asked_s = float("-inf")

    async def __call__(self) -> T:
        """Raises what ask raises. A caller that is cancelled ends the question for nobody else."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._answer())
            self._next.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._next)

    async def _answer(self) -> T:
        await asyncio.sleep(self._asked_s + APART_S - self._clock())
        self._next, self._asked_s = None, self._clock()
        return await self._ask()


def _retrieve_error(task: asyncio.Task[object]) -> None:
    """Marks the error as retrieved, since every caller may have been cancelled."""
    if not task.cancelled():
        task.exception()
