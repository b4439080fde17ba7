"""Tells an engine whose step stalls from one that is slow, idle or was stopped.

It counts its own ticks instead of reading a clock: a tick that comes late, because this process was stopped or got no
core, counts as one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

WATCH_EVERY_S = 1.0
MEDIANS = 20
"""How many times the median step a step may take."""

MEDIAN_STEPS = 64
"""The number of latest steps that the median is taken of."""


class StepWatchdog:
    """Detects that no step of a busy engine ends.

    Call `stepped` with each output of the engine and `tick` every tick_s.

    least_s: the time that a step may take in any case, however short the median.
    """

    def __init__(
        self, least_s: float, tick_s: float = WATCH_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least_s, self._tick_s, self._clock = least_s, tick_s, clock
        self._step_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._last: float | None = None
        """When the last step ended; None while the engine is idle, and until its first step after that."""

        self._idle_ticks = 0

    def stepped(self) -> None:
        """Notes that a step has ended."""
        now = self._clock()
        if self._last is not None:
            self._step_s.append(now - self._last)
        self._last, self._idle_ticks = now, 0

    @property
    def usual_s(self) -> float:
        """Returns the median step, 0 before the first."""
        return median(self._step_s) if self._step_s else 0.0

    def tick(self, busy: bool) -> str | None:
        """Returns why the engine counts as stalled, or None. busy: whether it has requests."""
        if not busy:
            self._last, self._idle_ticks = None, 0
            return None
        self._idle_ticks += 1
        usual_s = self.usual_s
        still_s = self._idle_ticks * self._tick_s
        if still_s <= max(self._least_s, MEDIANS * usual_s):
            return None
        return f"no step of the engine has ended for {still_s:g} s; the usual one takes {usual_s:.3g} s"
