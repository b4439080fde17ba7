"""Counts the rounds of a load so far, by the trace that the target's device writes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.emulation.load import Load
from tests.bench.emulation.rounds import count_full
from tests.bench.emulation.trace import read_traces


class FullRounds:
    """Counts the rounds of a load that begins now.

    Thread-safe as far as it needs be: two that look at once only read twice.
    """

    def __init__(
        self,
        traces: Path,
        load: Load,
        every_s: float,
        clock: Callable[[], float] = time.perf_counter,
        num_targets: int = 1,
    ) -> None:
        """every_s: at most so often it looks. num_targets: that share the load evenly."""
        self._batch = load.batch // num_targets
        self._traces, self._load, self._every_s, self._clock = traces, load, every_s, clock
        self._since_s = self._looked_s = clock()
        self._enough = False

    def are_enough(self) -> bool:
        now = self._clock()
        if not self._enough and now - self._looked_s >= self._every_s:
            self._looked_s = now
            targets = read_traces(self._traces, "target", self._since_s)
            self._enough = sum(count_full(target, self._batch) for target in targets) >= self._load.rounds
        return self._enough
