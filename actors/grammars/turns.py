"""Whose constraint is compiled next, and who has had too much compiled that came to nothing. Pure.

Start-time fair queueing (Goyal et al. 1996): each caller has a clock that what is compiled for it moves on by the
processor time that this really took, and the caller whose clock is furthest behind is next, with its smallest
constraint. A newcomer starts at the time of all, which goes on by an equal share of what is compiled, so that ever new
callers do not keep an old one waiting. Seconds that came to nothing, because the constraint was refused or
nobody waited any more, are counted besides: until they are worn off a caller comes behind all who have none, and with
more of them than a minute may cost nothing of its is compiled.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_RECORDS = 1024
"""Of callers, before those are looked for that tell nothing any more."""

Job = TypeVar("Job", bound=Hashable)


@dataclass(frozen=True)
class Turn(Generic[Job]):
    """suspect: the caller had wasted seconds when its turn came."""

    job: Job
    caller: int
    suspect: bool


@dataclass
class _Wasted:
    seconds: float
    at_s: float


class Turns(Generic[Job]):
    """Of jobs that callers wait for, several for the same one perhaps. Not thread-safe.

    longest_s: that a job may take, of processor time; it counts as that until it is done. wasted_s: that one caller may
    waste a minute.
    """

    def __init__(self, longest_s: float, wasted_s: float, clock: Callable[[], float]) -> None:
        self._longest_s, self._wasted_s, self._clock = longest_s, wasted_s, clock
        self._numbers = itertools.count()
        self._waiting: set[Job] = set()
        self._queues: dict[int, list[tuple[int, int, Job]]] = {}
        """By caller: heaps by size. Jobs that another caller's turn has taken stay until they are come upon."""

        self._running: Counter[int] = Counter()
        self._now_s = 0.0
        self._clocks: dict[int, float] = {}
        self._wasted: dict[int, _Wasted] = {}

    def put(self, job: Job, caller: int, size: int) -> None:
        """caller waits for it; again, where it does so already."""
        self._waiting.add(job)
        if caller not in self._queues:
            self._clocks[caller] = max(self._now_s, self._clocks.get(caller, 0.0))
        heapq.heappush(self._queues.setdefault(caller, []), (size, next(self._numbers), job))

    def take(self, *, suspects: bool = True) -> Turn[Job] | None:
        """The next one, which `done` is to follow. suspects: those who have wasted seconds may have a turn. None:
        there is none."""
        self._forget_taken()
        best: tuple[bool, float, int, int] | None = None
        chosen = 0
        for caller, queue in self._queues.items():
            size, number, _ = queue[0]
            rank = (self.is_suspect(caller), self._clocks[caller], size, number)
            if best is None or rank < best:
                best, chosen = rank, caller
        if best is None or (best[0] and not suspects):
            return None
        job = heapq.heappop(self._queues[chosen])[2]
        self._waiting.discard(job)
        self._now_s = max(self._now_s, best[1])
        self._clocks[chosen] = best[1] + self._longest_s
        self._running[chosen] += 1
        return Turn(job, chosen, best[0])

    def done(self, turn: Turn[Job], used_s: float, *, wasted: bool) -> None:
        """used_s: of processor time. wasted: it came to nothing, by no fault of the server's."""
        self._clocks[turn.caller] += used_s - self._longest_s
        self._running -= Counter([turn.caller])
        self._now_s += used_s / len({turn.caller, *self._queues, *self._running})
        if wasted:
            self.waste(turn.caller, used_s)
        if len(self._clocks) > MOST_RECORDS:
            at_work = {*self._queues, *self._running}
            self._clocks = {each: at for each, at in self._clocks.items() if at > self._now_s or each in at_work}

    def waste(self, caller: int, seconds: float) -> None:
        """Besides what its turns have."""
        now = self._clock()
        self._wasted[caller] = _Wasted(self._wasted_by(caller) + seconds, now)
        if len(self._wasted) > MOST_RECORDS:
            self._wasted = {each: wasted for each, wasted in self._wasted.items() if self._wasted_by(each) > 0}

    def is_suspect(self, caller: int) -> bool:
        return self._wasted_by(caller) > 0

    def retry_after_s(self, caller: int) -> float:
        """0: it may have more compiled now."""
        return max(0.0, (self._wasted_by(caller) - self._wasted_s) * 60 / self._wasted_s)

    def _wasted_by(self, caller: int) -> float:
        """What is not worn off yet, as it is evenly, wasted_s a minute."""
        if (wasted := self._wasted.get(caller)) is None:
            return 0.0
        return max(0.0, wasted.seconds - (self._clock() - wasted.at_s) * self._wasted_s / 60)

    def _forget_taken(self) -> None:
        for caller, queue in list(self._queues.items()):
            while queue and queue[0][2] not in self._waiting:
                heapq.heappop(queue)
            if not queue:
                del self._queues[caller]
