"""How long a request still has, and which requests have run out of time. Pure.

Wall-clock times are never compared: nodes disagree about them, and they are set back and forward. Each process counts
on its own monotonic clock, and what goes from one to the next is the time that is left.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field

_SLACK = 64


@dataclass(frozen=True)
class Deadline:
    """A moment of this process's monotonic clock after which an answer is worthless.

    Pickled, it is the time that is left, which goes on being counted where it is unpickled.
    """

    at_s: float
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        return cls(clock() + timeout_s, clock)

    def left_s(self) -> float:
        """Negative once it has passed."""
        return self.at_s - self.clock()

    def __reduce__(self) -> tuple[Callable[[float], Deadline], tuple[float]]:
        return Deadline.after, (self.left_s(),)


class Deadlines:
    """Deadlines of the requests an engine holds, on its process's monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline_s: float, held: Container[str]) -> None:
        """held: the ids that still count. Deadlines of others are dropped once they are many."""
        heapq.heappush(self._heap, (deadline_s, request_id))
        # Requests mostly end long before their deadline, and nobody says so here.
        if len(self._heap) > _SLACK and sum(name in held for _, name in self._heap) < len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1] in held]
            heapq.heapify(self._heap)

    def passed(self, now_s: float, held: Container[str]) -> list[str]:
        """Ids among held whose deadline has passed; each is given once."""
        late = []
        while self._heap and self._heap[0][0] <= now_s:
            request_id = heapq.heappop(self._heap)[1]
            if request_id in held:
                late.append(request_id)
        return late

    def __len__(self) -> int:
        return len(self._heap)
