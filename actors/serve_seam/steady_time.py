"""Serve's processes go by a time that does not jump.

They take differences of the time of day: since a replica's health was last asked for, until when one that is taken
down may go on, which report of load is the later one. Where the machine's clock is put back by an hour, nothing that
dies would be replaced for so long, and no report be heard; where it is put forward, what has time to end would be cut.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from outrider.actors.serve_seam import leans_on


class SteadyTime:
    """In place of the module ``time``: ``time()`` is the time of day when this was made, and goes on from there by the
    monotonic clock."""

    def __init__(self) -> None:
        self._began_s = time.time() - time.monotonic()

    def time(self) -> float:
        return self._began_s + time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


STEADY = SteadyTime()
"""One a process: what it takes differences of are its own times."""


def go_by_steady_time() -> None:
    """In a controller, whose environment names this (PROXY_ENVIRONMENT), a proxy or a replica."""
    leans_on.TIME.check()
    for borrowed in leans_on.TIME.names:
        vars(importlib.import_module(borrowed.name.partition(":")[0]))["time"] = STEADY
