"""Decides how many drafters a pool needs.

A drafter has to gain what it costs: tokens a second of the targets over plain decoding, against what its accelerators
would do as part of a target. Both come from the targets' length controllers. Serve applies delays and limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from outrider.actors.serving.autoscaling import Decision
from outrider.cluster.membership import Work
from outrider.cluster.scaling_config import PoolScalingConfig

TRIAL_S = 60.0
"""How long a drafter that was started to measure its gain runs at least."""

FIRST_AFTER_S = 30.0
"""When targets have not reported for so long from the start, they load, and one drafter is to load beside them."""


class PoolPolicy:
    """Desires as many drafters as the busy targets take, but no more than pay.

    Where none pays, one is desired every probe_s while requests run, to measure what it gains.
    """

    def __init__(self, settings: PoolScalingConfig, accelerators: float) -> None:
        """accelerators: a drafter's number of accelerators divided by a target's."""
        self._settings, self._accelerators = settings, accelerators
        self._first_at: float | None = None
        """math.inf: targets have reported."""

        self._unpaid_since: float | None = None
        self._trial_until: float | None = None
        """math.inf: until its drafter is loaded."""

    def decide(self, now_s: float, wanted: int, running: int, work: Sequence[Work] | None) -> Decision:
        """Call about once a second.

        Args:
            now_s: Monotonic time.
            wanted: Drafters that there are to be now.
            running: Those of them that are loaded.
            work: Of each target; None: not known.
        """
        if work is None:
            if self._first_at is None:
                self._first_at = now_s + FIRST_AFTER_S
            first = wanted == 0 and now_s >= self._first_at
            return Decision(1 if first else wanted, "no_data")
        self._first_at = math.inf
        decision = self._desired(now_s, wanted, running, [each for each in work if each.is_busy])
        return Decision(max(decision.replicas, wanted - 1), decision.reason)  # one at a time goes

    def _desired(self, now_s: float, wanted: int, running: int, busy: Sequence[Work]) -> Decision:
        if not busy:
            return Decision(0, "idle")
        taken = math.ceil(len(busy) / self._settings.targets_per_drafter)
        paid = self._paid(busy)
        if paid is None or paid >= 1:
            self._unpaid_since = self._trial_until = None
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
        if self._trial_until is not None:
            if self._trial_until == math.inf and running:
                self._trial_until = now_s + TRIAL_S
            if now_s < self._trial_until:
                return True
        if self._unpaid_since is None or wanted:  # while one runs its gain is known
            self._unpaid_since = now_s
        if now_s - self._unpaid_since < self._settings.probe_s:
            return False
        self._trial_until = math.inf
        return True
