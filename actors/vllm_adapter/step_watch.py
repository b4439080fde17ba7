"""Tells an engine whose step stands still from one that is slow, idle, or in a process that was stopped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

WATCH_EVERY_S = 1.0

MEDIANS = 20
"""A step may take so many times the usual one."""

_REMEMBERED = 64
"""Steps that the median is of."""


class StepWatch:
    """`stepped` is called with each output of the engine's, `tick` every tick_s. How long it has been still is counted
    in ticks, not read from a clock: one that came late, because this process was stopped or got no core, counts as one.
    Pure.

    least_s: the least that a step may take, whatever the usual one takes.
    """

    def __init__(
        self, least_s: float, tick_s: float = WATCH_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least_s, self._tick_s, self._clock = least_s, tick_s, clock
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: float | None = None
        """When the last step ended; None: before the pause that is now, or just was."""

        self._still = 0

    def stepped(self) -> None:
        now = self._clock()
        if self._last is not None:
            self._took.append(now - self._last)
        self._last, self._still = now, 0

    @property
    def usual_s(self) -> float:
        """The median step; 0 before the first."""
        return median(self._took) if self._took else 0.0

    def tick(self, busy: bool) -> str | None:
        """Why the engine counts as standing still, or None. busy: whether it has requests."""
        if not busy:
            self._last, self._still = None, 0
            return None
        self._still += 1
        usual_s = self.usual_s
        if self._still * self._tick_s <= max(self._least_s, MEDIANS * usual_s):
            return None
        still_s = self._still * self._tick_s
        return f"no step of the engine has ended for {still_s:g} s; the usual one takes {usual_s:.3g} s"
