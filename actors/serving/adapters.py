"""Adapters that are loaded while the server runs: the registry knows which there are to be, and every replica follows.

A call that loads one, or takes one away, tells the registry first and then all replicas that run. A replica that was
not there then, or that starts later, reads the registry: when it starts, when a request names what it does not know,
and every now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import ray

from outrider.actors.serving.answers import answer_within
from outrider.cluster.adapters import AdapterError

logger = logging.getLogger("ray.serve.outrider.target")

FOLLOW_EVERY_S = 10.0
_APART_S = 1.0
"""The registry is asked so seldom at most, whatever names requests have."""


class Loaded(Protocol):
    """A replica's adapters: outrider.actors.vllm_seam.adapters.Adapters."""

    @property
    def paths(self) -> Mapping[str, str]: ...

    async def load(self, name: str, path: str) -> None: ...

    async def unload(self, name: str) -> bool: ...


Ask = Callable[[dict[str, str] | None], Awaitable[Mapping[str, str]]]
"""``Registry.adapters``. Raises RayError or TimeoutError."""


class RunTimeAdapters:
    """Of one replica."""

    def __init__(
        self, loaded: Loaded, configured: Iterable[str], ask: Ask, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """configured: names of those that are there in any case."""
        self._loaded, self._configured, self._ask, self._clock = loaded, frozenset(configured), ask, clock
        self._following = asyncio.Lock()
        self._asked_s = float("-inf")
        self._known: dict[str, str] | None = None
        """As the registry last said; a new one in its place is told."""

        self._keeping: asyncio.Task[None] | None = None

    async def load(self, name: str, path: str) -> str | None:
        """What is wrong; None: it is loaded."""
        try:
            await self._loaded.load(name, path)
        except AdapterError as error:
            return str(error)
        return None

    async def unload(self, name: str) -> None:
        await self._loaded.unload(name)

    async def find(self, name: str | None) -> None:
        """See to it that it is there if it is to be."""
        if name is not None and name not in self._loaded.paths and self._clock() - self._asked_s >= _APART_S:
            await self.follow()

    async def follow(self) -> None:
        """Have those that the registry names, and no others. Raises nothing."""
        async with self._following:
            self._asked_s = self._clock()
            try:
                wanted = dict(await self._ask(self._known))
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("adapters: the registry does not answer: %s", error)
                return
            self._known = wanted
            paths = self._loaded.paths
            for name in [name for name in paths if name not in self._configured and wanted.get(name) != paths[name]]:
                await self._loaded.unload(name)
            for name, path in wanted.items():
                if name not in self._loaded.paths and (problem := await self.load(name, path)) is not None:
                    logger.error("adapter %r cannot be loaded here: %s", name, problem)

    def keep(self) -> None:
        """Follow from now on."""
        self._keeping = asyncio.create_task(self._keep())

    def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_EVERY_S)
            with suppress(ConnectionError):
                await self.follow()


def asked_of(registry: Callable[[], Any], within_s: float) -> Ask:
    """registry: its handle, now."""

    async def ask(known: dict[str, str] | None) -> Mapping[str, str]:
        answer = registry().adapters.remote(known)
        named: Mapping[str, str] = await answer_within(answer, within_s)
        return named

    return ask
