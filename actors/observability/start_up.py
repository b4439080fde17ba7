"""Logs how long the stages of a replica's start-up take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class StartUp:
    """Logs a stage when it is ``done``; the next one begins there."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock, self._began = logger, clock, clock()

    def done(self, stage: str) -> None:
        """Logs the time since the last stage."""
        now = self._clock()
        self._logger.info("start-up: %s: %.1f s", stage, now - self._began)
        self._began = now
