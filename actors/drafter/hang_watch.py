"""Detects a drafter that hangs, as opposed to one that is slow or was stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.25
LEAST_PATIENCE_S = 5.0
_DEADLINES = 2
"""Link deadlines that anything may take. The verifier has given up the link by then."""

_LONGEST_BEFORE = 4
_FADE = 0.999
"""Share of the longest time that is kept with each tick: half of it after some three minutes."""

STEP = "step"
"""Key of the loop's own work in DraftLoop.at_work; all other keys are links, for their messages."""

SWAP = "swap"
"""Key in its place while another version of the model's weights is loaded. Links are answered meanwhile."""

SWAP_PATIENCE_S = 120.0
_DOING: Mapping[int | str, str] = {
    STEP: "a step has been running",
    SWAP: "another version of the weights has been loading",
}


class HangWatch:
    """Detects work that takes too long, by counting its own ticks. Pure.

    A tick that comes late, because the process was stopped or got no core, counts once: nothing could run meanwhile.
    Whatever is under way may take `_DEADLINES` link deadlines, least_patience_s, or `_LONGEST_BEFORE` times what took
    longest lately, whichever is most. A swap may take SWAP_PATIENCE_S, and says nothing about how long a step may.
    """

    def __init__(self, tick_s: float = WATCH_EVERY_S, least_patience_s: float = LEAST_PATIENCE_S) -> None:
        self._tick_s, self._least_patience_s = tick_s, least_patience_s
        self._standing: dict[int | str, tuple[int, int]] = {}
        """By key the number of the work at the last tick, and for how many ticks it has been under way."""

        self._longest = 0.0

    def tick(self, at_work: Mapping[int | str, int], link_deadline_s: float) -> str | None:
        """Returns what has hung for too long, or None. at_work: see DraftLoop.at_work."""
        before, self._standing = self._standing, {}
        self._longest *= _FADE
        for key, (number, ticks) in before.items():
            if key != SWAP and at_work.get(key) != number:
                self._longest = max(self._longest, ticks)
        lately_s = _LONGEST_BEFORE * self._longest * self._tick_s
        patience_s = max(_DEADLINES * link_deadline_s, self._least_patience_s, lately_s)
        for key, number in at_work.items():
            known, ticks = before.get(key, (number, -1))
            ticks = ticks + 1 if known == number else 0
            self._standing[key] = number, ticks
            limit_s = max(patience_s, SWAP_PATIENCE_S) if key == SWAP else patience_s
            if ticks * self._tick_s > limit_s:
                return f"{_DOING.get(key, 'messages have been waiting')} for over {limit_s:g} s"
        return None


def end_when_hung(
    at_work: Callable[[], Mapping[int | str, int]],
    link_deadline_s: Callable[[], float],
    tick_s: float = WATCH_EVERY_S,
    least_patience_s: float = LEAST_PATIENCE_S,
) -> NoReturn:
    """Watches for ever and ends this process when it hangs. Its links' heartbeats and receive threads go on, so from
    outside it may look well."""
    watch = HangWatch(tick_s, least_patience_s)
    while True:
        time.sleep(tick_s)
        reason = watch.tick(at_work(), link_deadline_s())
        if reason is not None:
            logger.error("%s; this drafter ends and will be restarted", reason)
            os._exit(1)
