"""Where rounds' time went, from the traces of both models. Pure.

A round runs from the start of one target step to the start of the next. The target works from its beginning on; the
drafter's work lies under the target's, or after it, where it is exposed. What is left is idle: neither accelerator
works, so the host does, or a message is under way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray, scale: float) -> Spread:
        return cls(float(np.median(values)) * scale, float(np.percentile(values, 99)) * scale)


@dataclass(frozen=True)
class RoundTimes:
    """Of the rounds whose target step only decodes."""

    rounds: int
    period: Spread
    target: Spread
    draft: Spread
    """All the drafter's steps that fell into the round."""

    exposed_draft: Spread
    """The part of them that ran while the target did not."""

    idle: Spread
    """period - target - exposed_draft."""

    overhead: Spread
    """period - max(target, draft): what a round takes beyond perfect hiding. Nothing to go by where drafts are not
    hidden at all."""


def round_times(target: np.ndarray, drafter: np.ndarray, max_decode_tokens: int, scale: float = 1.0) -> RoundTimes:
    """target, drafter: `trace.RECORD` arrays in order of time. Times are multiplied by scale.

    Raises ValueError when no two target steps follow each other.
    """
    decoding = target["num_tokens"][:-1] <= max_decode_tokens
    if not decoding.any():
        raise ValueError(f"target: {len(target)} steps, none of which only decodes and is followed by another")
    starts, ends, nexts = (
        a[decoding] for a in (target["started_s"][:-1], target["ended_s"][:-1], target["started_s"][1:])
    )
    draft = _busy_until(drafter, nexts) - _busy_until(drafter, starts)
    exposed = _busy_until(drafter, nexts) - _busy_until(drafter, ends)
    period, step = nexts - starts, ends - starts
    columns = (period, step, draft, exposed, period - step - exposed, period - np.maximum(step, draft))
    return RoundTimes(int(decoding.sum()), *(Spread.of(column, 1e3 * scale) for column in columns))


def _busy_until(steps: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Seconds that steps, which do not overlap, had run by each time."""
    if not len(steps):
        return np.zeros_like(times)
    edges = np.stack([steps["started_s"], steps["ended_s"]], axis=1)
    run = np.zeros_like(edges)
    run[:, 1] = np.cumsum(edges[:, 1] - edges[:, 0])
    run[1:, 0] = run[:-1, 1]
    return np.interp(times, edges.ravel(), run.ravel())
