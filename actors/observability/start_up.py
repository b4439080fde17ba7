"""How long the stages of a replica's start-up take: said in its log, where whoever started it reads them.

A replica cannot be asked anything before it is up, and its log is on the machine of whoever runs `outrider serve`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

_STAGE = re.compile(r"start-up: ([a-z][\w ,]*): (\d+\.\d) s\b")


class StartUp:
    """Call ``done`` at the end of each stage; the next one begins there."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._began = clock()

    def done(self, stage: str) -> None:
        """stage: lower case; letters, digits, spaces and commas."""
        now = self._clock()
        self._logger.info("start-up: %s: %.1f s", stage, now - self._began)
        self._began = now


def stages_in(log: str) -> list[tuple[str, float]]:
    """(stage, seconds) of every line in a log, in text or JSON, in its order."""
    return [(stage, float(seconds)) for stage, seconds in _STAGE.findall(log)]
