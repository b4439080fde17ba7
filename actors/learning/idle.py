"""Whether drafters have so little to do that their cores can be trained on. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

MOMENT_S = 1.0
"""A drafter that has had nothing to do for so long is idle: between two rounds of a request it is not."""

FORGOTTEN_S = 5.0
"""A drafter that has not been heard of for so long is gone, or hands over nothing."""


class IdleTime:
    """Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, bool]] = {}
        """By drafter: when, and whether it was idle."""

    def heard(self, drafter: str, idle_s: float | None) -> None:
        """idle_s: for how long it has had nothing to do; None: it has."""
        self._heard[drafter] = self._clock(), idle_s is not None and idle_s >= MOMENT_S

    @property
    def is_now(self) -> bool:
        """All drafters that are there are idle."""
        now = self._clock()
        return all(idle for at, idle in list(self._heard.values()) if now - at < FORGOTTEN_S)
