"""Shares parts of answers between the suffix drafters of all replicas, by way of one named Ray actor.

A pool that is slow or gone costs learning from others, nothing else (see shared_actor.py).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import ray

from outrider.actors.drafter.shared_actor import IdleLife, Member, SharedActor, get_or_create
from outrider.actors.drafter.suffix import AnswerPart

PARTS_AT_ONCE = 256

Cursor = tuple[str, int]
"""A log's name, and the number of its first part that a drafter does not have."""


@dataclass
class Exchange:
    """Holds what a drafter gets. cursor: for its next call. more: there are more parts to be had at once."""

    cursor: Cursor
    parts: list[AnswerPart]
    more: bool = False


class PartLog:
    """Holds the latest parts of all drafters, in the order in which they came."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._name = secrets.token_hex(4)  # a cursor of another log means nothing here
        self._parts: deque[AnswerPart] = deque()
        self._first = 0
        """Number of the oldest part that is held."""

    def add(self, parts: list[AnswerPart]) -> None:
        self._parts.extend(parts)
        self._num_tokens += sum(map(_size, parts))
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= _size(self._parts.popleft())
            self._first += 1

    def since(self, cursor: Cursor | None, drafter: str, most: int = PARTS_AT_ONCE) -> Exchange:
        """Returns up to `most` parts from the cursor on, without the drafter's own; None: from the oldest."""
        start = cursor[1] if cursor is not None and cursor[0] == self._name else 0
        start, last = max(start, self._first), self._first + len(self._parts)
        end = min(start + most, last)
        parts = islice(self._parts, start - self._first, end - self._first)
        return Exchange((self._name, end), [part for part in parts if part.request[0] != drafter], end < last)


def _size(part: AnswerPart) -> int:
    return len(part.token_ids) + len(part.context)


class SuffixPool:
    """The Ray actor around a PartLog."""

    def __init__(self, max_tokens: int) -> None:
        self._log = PartLog(max_tokens)
        self._life = IdleLife()

    async def exchange(self, drafter: str, cursor: Cursor | None, parts: list[AnswerPart]) -> Exchange:
        self._life.asked()
        self._log.add(parts)
        return self._log.since(cursor, drafter)


def suffix_pool(app_name: str, max_tokens: int) -> SharedActor:
    """Returns the application's pool, which the first call of any drafter starts."""
    return SharedActor(lambda: get_or_create(SuffixPool, f"SuffixPool:{app_name}", max_tokens), ray.get)


class PoolMember(Member):
    """Sends one drafter's parts to the pool and takes those of the others."""

    def __init__(
        self,
        drafter: str,
        pool: SharedActor,
        take: Callable[[], list[AnswerPart]],
        learn: Callable[[list[AnswerPart]], None],
    ) -> None:
        """pool: a SharedActor around a SuffixPool."""
        super().__init__("suffix pool", self._once)
        self._drafter, self._pool, self._take, self._learn = drafter, pool, take, learn
        self._cursor: Cursor | None = None

    def _once(self) -> bool:
        answer: Exchange = self._pool.call("exchange", self._drafter, self._cursor, self._take())
        self._cursor = answer.cursor
        if answer.parts:
            self._learn(answer.parts)
        return answer.more
