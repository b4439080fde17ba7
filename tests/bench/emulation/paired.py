"""Ways that are measured in turns, and the ratio of two. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5th percentile of Student's t with 1 to 30 degrees of freedom."""


def in_turns(names: Sequence[str], pairs: int, turn: Callable[[str, int], _T]) -> dict[str, list[_T]]:
    """What `turn` finds of each, asked with its name and the number of the pair. Who is first changes from pair to
    pair."""
    found: dict[str, list[_T]] = {name: [] for name in names}
    for number in range(pairs):
        for name in names[:: -1 if number % 2 else 1]:
            found[name].append(turn(name, number))
    return found


@dataclass(frozen=True)
class Interval:
    """A ratio and its two-sided 95% interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Geometric mean of ours / theirs, pair by pair, and the t-interval of its logarithm: what both had in common, a
    machine that slows down over the hour, falls out. Speeds above 0, as many of each.

    Raises ValueError for fewer than two pairs.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"pairs: {len(logs)}; an interval needs two at least")
    mean, degrees = statistics.fmean(logs), len(logs) - 1
    t = _T_975[degrees - 1] if degrees <= len(_T_975) else _T_975[-1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
