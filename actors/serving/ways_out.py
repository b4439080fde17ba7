"""Answers whose way out is gone: the proxy that held the client's connection, or the ingress behind it, has died.

Whoever leaves says so, and the engine aborts what was asked. A process that is killed says nothing: what it had asked
for would be made to its end, for nobody. So every request tells which processes its answer goes out through, and the
replica that makes it looks, while it does, whether they live.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import ray

logger = logging.getLogger("ray.serve.outrider.target")

LOOK_S = 2.0

PROXY = "outrider-proxy"
"""Metadata, or a key of ASGI's scope, by which a proxy tells an ingress which process it is."""

COMES_THROUGH: ContextVar[str] = ContextVar("comes_through", default="")
"""In an ingress: the proxy that a request came through. Empty: none that is known."""


def this_process() -> str:
    """The actor's name and id; empty where this is none of Ray's."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    return f"{context.get_actor_name()} {actor}" if actor else ""


def way_out() -> tuple[str, ...]:
    """Of the answer to the request that this ingress is busy with."""
    return tuple(filter(None, (COMES_THROUGH.get(), this_process())))


class WaysOut:
    """Of the requests that a replica answers. For its event loop."""

    def __init__(
        self,
        abort: Callable[[str, int], Awaitable[bool]],
        lives: Callable[[str], bool],
        look_s: float = LOOK_S,
    ) -> None:
        """abort: ends a request by its id and its caller. lives: of a process as this_process names it; asked in a
        thread."""
        self._abort, self._lives, self._look_s = abort, lives, look_s
        self._requests: dict[str, list[tuple[str, int]]] = {}
        """By process."""

        self._met: set[str] = set()
        """Processes that have been seen alive. Only these are taken for dead: what goes by a name that nothing is
        found under may be well."""

        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def hold(self, request_id: str, caller: int, processes: tuple[str, ...]) -> Iterator[None]:
        """While it is answered. caller: whose id it is, 0: nobody's. processes: those that its answer goes out
        through."""
        request = request_id, caller
        for process in processes:
            self._requests.setdefault(process, []).append(request)
        if self._requests and self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            for process in processes:
                self._requests[process].remove(request)
                if not self._requests[process]:
                    del self._requests[process]

    async def _look(self) -> None:
        """Until nothing is held. A request that has not reached the engine yet is ended at a later look."""
        while self._requests:
            for process in list(self._requests):
                try:
                    await self._end_those_of(process)
                except Exception:
                    logger.exception("not known who still waits for what goes out through %s", process)
            await asyncio.sleep(self._look_s)
        self._looking = None

    async def _end_those_of(self, process: str) -> None:
        if await asyncio.to_thread(self._lives, process):
            self._met.add(process)
            return
        if process not in self._met:
            return
        for request_id, caller in list(self._requests.get(process, ())):
            logger.warning("%s is gone: request %s is aborted", process.split(" ")[0], request_id)
            await self._abort(request_id, caller)
