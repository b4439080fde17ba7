"""Which requests have run out of time. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Container

_SLACK = 64


class Deadlines:
    """Deadlines of the requests an engine holds, as wall-clock times. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline_unix_s: float, held: Container[str]) -> None:
        """held: the ids that still count. Deadlines of others are dropped once they are many."""
        heapq.heappush(self._heap, (deadline_unix_s, request_id))
        # Requests mostly end long before their deadline, and nobody says so here.
        if len(self._heap) > _SLACK and sum(name in held for _, name in self._heap) < len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1] in held]
            heapq.heapify(self._heap)

    def passed(self, now_unix_s: float, held: Container[str]) -> list[str]:
        """Ids among held whose deadline has passed; each is given once."""
        late = []
        while self._heap and self._heap[0][0] <= now_unix_s:
            request_id = heapq.heappop(self._heap)[1]
            if request_id in held:
                late.append(request_id)
        return late

    def __len__(self) -> int:
        return len(self._heap)
