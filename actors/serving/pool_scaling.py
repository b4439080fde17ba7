"""Decides how many drafters a pool needs.

A drafter has to gain what it costs: tokens a second of the targets over plain decoding, against what its accelerators
would do as part of a target. Both come from the targets' length controllers. Serve applies delays and limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from outrider.actors.serving.autoscaling import Decision
from outrider.cluster.config import PoolScalingConfig
from outrider.cluster.drafter_registry import Work

POOL_REASONS = ("targets", "gain", "idle", "probe", "no_data")
"""Why a number of drafters is desired (docs/deployment.md)."""

PROBE_S = 900.0
"""How often a drafter is started to measure its gain while none pays and requests run."""

TRIAL_S = 60.0
"""Shortest time that such a drafter runs."""


class PoolPolicy:
    """Desires as many drafters as the busy targets take, but no more than pay.

    Where none pays, one is desired every PROBE_S while requests run, to measure what it gains.
    """

    def __init__(self, settings: PoolScalingConfig, accelerators: float) -> None:
        """Starts without a trial. accelerators: a drafter's number of accelerators divided by a target's."""
        self._settings, self._accelerators = settings, accelerators
        self._unpaid_since = math.inf
        self._trial_until = -math.inf
        """math.inf: until its drafter is loaded."""

    def decide(self, now_s: float, wanted: int, running: int, work: Sequence[Work] | None) -> Decision:
        """Call about once a second.

        Args:
            now_s: Monotonic time.
            wanted: Serve's present target number of drafters.
            running: Drafters that are loaded.
            work: By target; None: not known.
        """
        if work is None:
            return Decision(wanted, "no_data")
        decision = self._desired(now_s, wanted, running, [each for each in work if each.is_busy])
        return Decision(max(decision.replicas, wanted - 1), decision.reason)  # one at a time goes

    def _desired(self, now_s: float, wanted: int, running: int, busy: Sequence[Work]) -> Decision:
        if not busy:
            return Decision(0, "idle")
        taken, paid = math.ceil(len(busy) / self._settings.targets_per_drafter), self._paid(busy)
        if paid is None or paid >= 1:
            self._unpaid_since, self._trial_until = math.inf, -math.inf
            return Decision(taken, "targets") if paid is None or paid >= taken else Decision(paid, "gain")
        return Decision(1, "probe") if self._is_trial(now_s, wanted, running) else Decision(0, "gain")

    def _paid(self, busy: Sequence[Work]) -> int | None:
        """Returns how many drafters gain what they cost; None: not known."""
        known = [work for work in busy if work.plain_rate > 0]
        if not known:
            return None
        gain = fmean(max(work.rate - work.plain_rate, 0.0) for work in known) * len(busy)
        cost = self._settings.worth * self._accelerators * fmean(work.plain_rate for work in known)
        if cost == 0:
            return None if gain > 0 else 0
        return int(gain / cost)

    def _is_trial(self, now_s: float, wanted: int, running: int) -> bool:
        """Returns whether a drafter is to run, although none pays by what is known, to measure its gain."""
        if self._trial_until == math.inf and running:
            self._trial_until = now_s + TRIAL_S
        if now_s < self._trial_until:
            return True
        self._unpaid_since = now_s if wanted else min(self._unpaid_since, now_s)  # while one runs its gain is known
        if now_s - self._unpaid_since < PROBE_S:
            return False
        self._trial_until = math.inf
        return True
