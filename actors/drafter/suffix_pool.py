"""What the suffix drafters of all replicas tell each other: parts of answers, by way of one named Ray actor.

A pool that is slow or gone costs learning from others, nothing else (see shared_actor.py).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import ray

from outrider.actors.drafter.shared_actor import IdleLife, Member, SharedActor, get_or_create
from outrider.actors.drafter.suffix import AnswerPart

PARTS_AT_ONCE = 256


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
        self._life = IdleLife()

    async def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange:
        self._life.asked()
        self._log.add(parts)
        return self._log.since(cursor, drafter)


class Pool(Protocol):
    """A pool as a drafter sees it; may raise whatever a call to another process raises."""

    def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange: ...


class RayPool:
    """The application's pool, made by whichever drafter asks first."""

    def __init__(
        self, app_name: str, max_tokens: int, get: Callable[..., Any] = ray.get, find: Callable[[], Any] | None = None
    ) -> None:
        """get: as ray.get. find: returns the actor's handle, which may still be starting."""
        self._actor = SharedActor(
            find or (lambda: get_or_create(SuffixPool, f"SuffixPool:{app_name}", max_tokens)), get
        )

    def exchange(self, drafter: str, cursor: tuple[str, int] | None, parts: list[AnswerPart]) -> Exchange:
        """See SharedActor.call."""
        answer: Exchange = self._actor.call("exchange", drafter, cursor, parts)
        return answer


class PoolMember(Member):
    """One drafter's side: takes what it has to tell, hands on what it is told."""

    def __init__(
        self,
        drafter: str,
        pool: Pool,
        take: Callable[[], list[AnswerPart]],
        learn: Callable[[list[AnswerPart]], None],
    ) -> None:
        super().__init__("suffix pool", self._once)
        self._drafter, self._pool, self._take, self._learn = drafter, pool, take, learn
        self._cursor: tuple[str, int] | None = None

    def _once(self) -> bool:
        answer = self._pool.exchange(self._drafter, self._cursor, self._take())
        self._cursor = answer.cursor
        if answer.parts:
            self._learn(answer.parts)
        return answer.more
