"""When a request that is switched off is tried again: with exponential back-off, and within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.length.limits import LengthLimits

_SETTLED_ROUNDS = 32
"""Rounds of drafting after which a switched-on request has shown that it pays: its next probes come early again."""

_SAVED_ROUNDS = 2048
"""The budget is saved up over so many rounds at most."""

_FIRST_BUDGET_ROUNDS = 100


@dataclass(slots=True)
class _Clock:
    interval: int
    off_rounds: int = 0
    on_rounds: int = 0
    probe_rounds_left: int = 0


class Probing:
    """A round at a time: `advance`, then `probed` says who is on probe in this round."""

    def __init__(self, limits: LengthLimits) -> None:
        self._limits = limits
        self._clocks: dict[str, _Clock] = {}
        self._budget_s = 0.0
        self._round_s = 0.0
        self.probes = 0
        """Begun, counted by request."""

        self.probed: dict[str, int] = {}
        """On probe in this round, and for how many rounds more."""

        self.ended = False
        """A probe has its last round in this one: the next plan can judge it."""

    def __len__(self) -> int:
        return len(self._clocks)

    def track(self, request_id: str) -> None:
        self._clocks[request_id] = _Clock(self._limits.probe_after)

    def untrack(self, request_id: str) -> None:
        self._clocks.pop(request_id, None)
        self.probed.pop(request_id, None)

    def is_on_probe(self, request_id: str) -> bool:
        """A probe runs its course, whatever the plan makes of its first rounds."""
        return self._clocks[request_id].probe_rounds_left > 0

    def advance(
        self, off: Sequence[str], on: Sequence[str], round_s: float, extra_s: Callable[[int], float]
    ) -> list[str]:
        """off: requests of this round that the plan gives no drafts, or that are on probe; on: the others. extra_s:
        what a round costs more with so many requests on probe. Returns those whose probe begins."""
        self._earn(round_s)
        self.probed, self.ended = {}, False
        for request_id in on:
            self._stays_on(request_id)
        due = []
        for request_id in off:
            clock = self._clocks[request_id]
            clock.on_rounds = 0
            if clock.probe_rounds_left:
                self._continue(request_id, clock)
                continue
            clock.off_rounds += 1
            if clock.off_rounds >= clock.interval:
                due.append(request_id)
        return self._begin(off, due, extra_s) if due else []

    def _begin(self, off: Sequence[str], due: list[str], extra_s: Callable[[int], float]) -> list[str]:
        # Those half-way to their own join in: a round on probe together costs less than two.
        for request_id in off:
            clock = self._clocks[request_id]
            if not clock.probe_rounds_left and clock.interval / 2 <= clock.off_rounds < clock.interval:
                due.append(request_id)
        most_s = _SAVED_ROUNDS * self._limits.probe_share * self._round_s
        while len(due) > 1 and self._limits.probe_rounds * extra_s(len(due)) > most_s:
            due = due[: len(due) // 2]
        cost_s = self._limits.probe_rounds * extra_s(len(due))
        if cost_s > self._budget_s:
            return []
        self._budget_s -= cost_s
        self.probes += len(due)
        for request_id in due:
            clock = self._clocks[request_id]
            clock.probe_rounds_left, clock.off_rounds = self._limits.probe_rounds, 0
            self._continue(request_id, clock)
        return due

    def _continue(self, request_id: str, clock: _Clock) -> None:
        clock.probe_rounds_left -= 1
        self.probed[request_id] = clock.probe_rounds_left
        if not clock.probe_rounds_left:
            self.ended = True
            clock.interval = min(2 * clock.interval, self._limits.probe_after_max)

    def _stays_on(self, request_id: str) -> None:
        clock = self._clocks[request_id]
        clock.off_rounds = clock.probe_rounds_left = 0
        clock.on_rounds += 1
        if clock.on_rounds >= _SETTLED_ROUNDS:
            clock.interval = self._limits.probe_after

    def _earn(self, round_s: float) -> None:
        if not self._round_s:
            self._budget_s = _FIRST_BUDGET_ROUNDS * self._limits.probe_share * round_s
        self._round_s = round_s
        most_s = _SAVED_ROUNDS * self._limits.probe_share * round_s
        self._budget_s = min(self._budget_s + self._limits.probe_share * round_s, most_s)
