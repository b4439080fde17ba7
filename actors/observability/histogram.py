"""Counts durations in the engine's step thread and the drafter's loop, and sends them to the replica as plain values.

prometheus_client's own takes a lock for every value and cannot be sent to another process.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TypedDict

ROUND_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5,
)  # fmt: skip
"""Upper bounds for parts of a round: a link's round trip at one end, a step on a few cores at the other."""


class HistogramSnapshot(TypedDict):
    """Holds a histogram's values. bounds are inclusive; counts are not cumulative, and the last is of what is above."""

    bounds: list[float]
    counts: list[int]
    sum: float


class Histogram:
    """Counts values by bound. Not thread-safe: one thread observes; a snapshot may be one value behind."""

    def __init__(self, bounds: tuple[float, ...] = ROUND_SECONDS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
