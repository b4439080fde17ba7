"""What the suffix drafters of all replicas tell each other: parts of answers, by way of one named Ray actor.

Control only, never on the path of a round: every drafter hands over what it has and takes what is new about once a
second. A pool that is slow or gone costs learning from others, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.actors.drafter.suffix import AnswerPart
from outrider.cluster.placement import NAMESPACE

logger = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 1.0
PARTS_AT_ONCE = 256
_CALL_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 120.0
"""For the first answer of a pool that has just been looked up: it may have to start, a process that imports this
package, while models load beside it."""

_LONGEST_PAUSE_S = 30.0
_IDLE_LIFE_S = 120.0
"""A pool that nobody has asked for so long ends itself: its application is gone."""


@dataclass
class Exchange:
    """What a drafter gets. cursor: to be brought along the next time. more: there is more to be had at once."""

    cursor: tuple[str, int]
    parts: list[AnswerPart]
    more: bool = False


@dataclass
class PartLog:
    """The latest parts of all drafters, in the order in which they came. Pure."""

    max_tokens: int
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """Of this log: a cursor of another one means nothing here."""

    def __post_init__(self) -> None:
        self._parts: deque[AnswerPart] = deque()
        self._num_tokens = 0
        self._first = 0
        """Number of the oldest part that is still here."""

    def add(self, parts: list[AnswerPart]) -> None:
        for part in parts:
            self._parts.append(part)
            self._num_tokens += len(part.token_ids) + len(part.context)
        while self._num_tokens > self.max_tokens:
            oldest = self._parts.popleft()
            self._num_tokens -= len(oldest.token_ids) + len(oldest.context)
            self._first += 1

    def since(self, cursor: tuple[str, int] | None, drafter: str, most: int = PARTS_AT_ONCE) -> Exchange:
        """Up to most parts after cursor that are not the drafter's own; None: from the oldest."""
        start = cursor[1] if cursor is not None and cursor[0] == self.name else 0
        start = max(start, self._first)
        end = min(start + most, self._first + len(self._parts))
        parts = islice(self._parts, start - self._first, end - self._first)
        others = [part for part in parts if part.request[0] != drafter]
        return Exchange((self.name, end), others, more=end < self._first + len(self._parts))


class SuffixPool:
    """The Ray actor around a PartLog."""

    def __init__(self, max_tokens: int) -> None:
        self._log = PartLog(max_tokens)
        self._asked = time.monotonic()
        self._reaper: asyncio.Task | None = None

    async def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange:
        self._asked = time.monotonic()
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        self._log.add(parts)
        return self._log.since(cursor, drafter)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_LIFE_S / 4)
            if time.monotonic() - self._asked > _IDLE_LIFE_S:
                os._exit(0)  # exit_actor raises, which would end this task and not the actor


class Pool(Protocol):
    """A pool as a drafter sees it; may raise whatever a call to another process raises."""

    def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange: ...


class RayPool:
    """The application's pool, made by whichever drafter asks first."""

    def __init__(
        self, app_name: str, max_tokens: int, get: Callable[..., Any] = ray.get, find: Callable[[], Any] | None = None
    ) -> None:
        """get: as ray.get. find: returns the actor's handle, which may still be starting."""
        self._name, self._max_tokens = f"SuffixPool:{app_name}", max_tokens
        self._get, self._find = get, find or self._get_or_create
        self._actor: Any = None

    def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange:
        """Raises RayError or GetTimeoutError; the next call looks the pool up anew."""
        actor, self._actor = self._actor, None
        timeout_s = _CALL_TIMEOUT_S
        if actor is None:
            actor, timeout_s = self._find(), _START_TIMEOUT_S
        answer: Exchange = self._get(actor.exchange.remote(drafter, cursor, parts), timeout=timeout_s)
        self._actor = actor
        return answer

    def _get_or_create(self) -> Any:
        return (
            ray.remote(SuffixPool)
            .options(
                name=self._name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                # Not on the bundles of the replica that happens to ask first: they go when that replica goes.
                scheduling_strategy=PlacementGroupSchedulingStrategy(None),
                num_cpus=0,
            )
            .remote(self._max_tokens)
        )


@dataclass
class PoolMember:
    """One drafter's side: takes what it has to tell, hands on what it is told. Counts, and never raises."""

    drafter: str
    pool: Pool
    take: Callable[[], list[AnswerPart]]
    learn: Callable[[list[AnswerPart]], None]
    failures: int = 0
    """Exchanges that failed; the parts they carried are lost to others."""

    def __post_init__(self) -> None:
        self._cursor: tuple[str, int] | None = None
        self._failing = False

    def exchange(self) -> bool:
        """Once. Returns whether there is more to be had at once."""
        try:
            answer = self.pool.exchange(self.drafter, self._cursor, self.take())
        except Exception as error:  # noqa: BLE001 - of another process; speculation goes on with what is known
            self.failures += 1
            if not self._failing:
                self._failing = True
                logger.warning("suffix pool not reachable, drafting from this drafter's own answers: %s", error)
            return False
        self._failing = False
        self._cursor = answer.cursor
        if answer.parts:
            self.learn(answer.parts)
        return answer.more

    def run(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """For ever, on a thread of its own."""
        pause_s = EXCHANGE_EVERY_S
        while True:
            failures = self.failures
            more = self.exchange()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if self.failures > failures else EXCHANGE_EVERY_S
            if not more:
                sleep(pause_s)

    def start(self) -> None:
        threading.Thread(target=self.run, name="suffix-pool", daemon=True).start()
