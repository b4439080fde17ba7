"""Shares one call to the replicas among all callers that ask the same at a time: health and status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

APART_S = 0.25
"""Shortest time between two calls of ask; callers in between share the next one."""

T = TypeVar("T")


class SharedPoll(Generic[T]):
    """Shares one call of ask among concurrent callers of one event loop. No result is older than the call for it."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._next: asyncio.Task[T] | None = None
        self._asked_s = float("-inf")

    async def __call__(self) -> T:
        """Returns the result of ask, or raises its error. Cancelling one caller does not affect the others."""
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
