"""A histogram that a hot path can afford and that travels as plain values. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TypedDict

ROUND_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5,
)  # fmt: skip
"""Upper bounds for parts of a round: a link's round trip at one end, a step on a few cores at the other."""


class HistogramSnapshot(TypedDict):
    bounds: list[float]
    """Upper bounds, inclusive, ascending; what is above the last is in the last count."""

    counts: list[int]
    """One more than bounds, not cumulative."""

    sum: float


class Histogram:
    """bounds: as in HistogramSnapshot. Not thread-safe: one thread observes, and a snapshot may be one value behind."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = ROUND_SECONDS) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"bounds: {list(bounds)} is not an ascending list")
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
