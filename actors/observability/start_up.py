"""Logs how long the stages of a replica's start-up take, for `outrider serve` to read: it cannot be asked yet."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

_STAGE = re.compile(r"start-up: ([a-z][\w ,]*): (\d+\.\d) s\b")


class StartUp:
    """Logs a stage when it is ``done``; the next one begins there."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock, self._began = logger, clock, clock()

    def done(self, stage: str) -> None:
        """Logs the time since the last stage. stage: lower case; letters, digits, spaces and commas."""
        now = self._clock()
        self._logger.info("start-up: %s: %.1f s", stage, now - self._began)
        self._began = now


def stages_in(log: str) -> list[tuple[str, float]]:
    """Returns (stage, seconds) of every line in a log, in text or JSON, in its order."""
    return [(stage, float(seconds)) for stage, seconds in _STAGE.findall(log)]
