"""How an ingress is taken down: it refuses what comes, and finishes what it has.

Whoever takes the server down begins it, asks how many answers are left, and cuts them when they take too long. Serve
does the like to a replica that it stops by itself (scale-down, rollout, node drain), with the deployment's
graceful_shutdown_timeout_s; what it cannot know is that a health watch never ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


class Draining(ConnectionError):
    """The request was not taken, or its answer was cut: the server is being taken down."""

    def __init__(self) -> None:
        super().__init__("the server is being taken down")


class Drain:
    """Of one ingress process, for its event loop."""

    def __init__(self) -> None:
        self.begun = False
        """Nothing more is taken."""

        self.left = 0
        """Answers that are still to be finished, those that wait for a replica among them."""

        self._cut = False
        self._waiting: set[asyncio.Timeout] = set()
        self._is_stopping: Callable[[], bool] = bool

    def watch(self, is_stopping: Callable[[], bool]) -> None:
        """is_stopping: whether Serve takes this replica down. Called at once, for what it raises if it cannot know."""
        is_stopping()
        self._is_stopping = is_stopping

    @property
    def ends_watches(self) -> bool:
        """Streams that have no end of their own must find one now: they would use up all of the time."""
        return self.begun or self._is_stopping()

    def begin(self) -> int:
        """Any number of times. Returns how many answers are left."""
        self.begun = True
        return self.left

    def cut(self) -> int:
        """End what is left, with Draining. Returns how much that is."""
        self.begun = self._cut = True
        for waiting in self._waiting:
            waiting.reschedule(0.0)
        return self.left

    async def through(self, answer: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The same, counted until it ends. Raises Draining."""
        if self.begun:
            raise Draining
        self.left += 1
        try:
            async with aclosing(answer):
                while (part := await self._next(answer)) is not self:
                    yield part
        finally:
            self.left -= 1

    async def _next(self, answer: AsyncGenerator[T, None]) -> Any:
        """self at the end."""
        if self._cut:
            raise Draining
        waiting = asyncio.timeout(None)
        self._waiting.add(waiting)
        try:
            async with waiting:
                return await anext(answer, self)
        except TimeoutError:
            if waiting.expired():
                raise Draining from None
            raise
        finally:
            self._waiting.discard(waiting)


DRAIN = Drain()
"""This process's."""


class DrainCalls:
    """A base of the ingress deployment: what is asked of each of its replicas when the server is taken down."""

    async def begin_drain(self) -> int:
        """See Drain.begin."""
        return DRAIN.begin()

    async def cut_drain(self) -> int:
        """See Drain.cut."""
        return DRAIN.cut()
