"""Ends a drafter that hangs: its heartbeats and Ray's calls are on other threads, so from outside it may look well."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from typing import NoReturn

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
PATIENCE_S = 60.0
"""Time that any work may take. A step takes milliseconds, loading another version of the weights takes seconds.
Targets decode plainly meanwhile."""


class HangWatch:
    """Detects work that takes too long, by counting its own ticks.

    A tick that comes late, because the process was stopped or got no core, counts once: nothing could run meanwhile.
    """

    def __init__(self, patience_ticks: float) -> None:
        self._patience_ticks = patience_ticks
        self._ticks: dict[int, int] = {}
        """By the number of work, for how many ticks it has been under way."""

    def tick(self, at_work: Collection[int]) -> bool:
        """Returns whether some work has hung. at_work: see DraftLoop.at_work."""
        self._ticks = {number: self._ticks.get(number, -1) + 1 for number in at_work}
        return any(ticks > self._patience_ticks for ticks in self._ticks.values())


def end_when_hung(
    at_work: Callable[[], Collection[int]], tick_s: float = WATCH_EVERY_S, patience_s: float = PATIENCE_S
) -> NoReturn:
    """Watches for ever and ends this process when it hangs."""
    watch = HangWatch(patience_s / tick_s)
    while not watch.tick(at_work()):
        time.sleep(tick_s)
    logger.error("a step or a message has taken over %g s; this drafter ends and will be restarted", patience_s)
    os._exit(1)
