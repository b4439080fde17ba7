"""How many drafters a pool should have. Pure: told what is, with the time; says a number and why.

A drafter has to gain what it costs: tokens a second of the targets over what they would do plainly, against what its
accelerators would do as part of a target. Both are what the targets' length controllers expect from what they measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.actors.serving.autoscaling import Decision
from outrider.cluster.membership import Work
from outrider.cluster.scaling_config import PoolScalingConfig

TRIAL_S = 60.0
"""How long a drafter that was started to see what it gains drafts at least."""

FIRST_AFTER_S = 30.0
"""When nobody has said anything for so long from the beginning, targets load for the first time, and one drafter is to
load beside them. Longer than it takes to be told where they do not: the controller was replaced, or a deploy came."""


@dataclass(frozen=True)
class PoolLook:
    """What is there at one moment."""

    now_s: float
    """On a clock that only goes forward."""

    wanted: int
    """Drafters that Serve sees to."""

    running: int
    """Those of them that are loaded."""

    work: Sequence[Work] | None
    """Of each target; None: nobody has said lately."""


class PoolPolicy:
    """`decide` is called about once a second.

    Called for are as many drafters as the targets that are at work take, but no more than pay. What is more has to be
    called for for upscale_delay_s, the first one with pauses that would not have ended one; one less has to do for
    downscale_delay_s without a break. Where none pays, one is started every probe_s while requests run, and has its
    trial.
    """

    def __init__(self, settings: PoolScalingConfig, accelerators: float) -> None:
        """accelerators: a drafter's, by those of a target."""
        self._settings, self._accelerators = settings, accelerators
        self._more_since: float | None = None
        self._called_at = -math.inf
        """When more were called for last."""

        self._spare_since: float | None = None
        self._unpaid_since: float | None = None
        self._first_at: float | None = None
        """math.inf: somebody has said something."""

        self._trial_until: float | None = None
        """math.inf: until it is loaded."""

    def decide(self, look: PoolLook, least: int | None = None, most: int | None = None) -> Decision:
        """least, most: instead of the configuration's min and max."""
        least = self._settings.min if least is None else least
        most = self._settings.max if most is None else most
        bounded = min(max(look.wanted, least), most)
        if bounded != look.wanted:
            self._more_since = self._spare_since = None
            return Decision(bounded, "bounds")
        if look.work is None:
            self._more_since = self._spare_since = None
            if self._first_at is None:
                self._first_at = look.now_s + FIRST_AFTER_S
            first = look.wanted == 0 and look.now_s >= self._first_at
            return Decision(min(1, most) if first else look.wanted, "no_data")
        self._first_at = math.inf
        number, reason = self._called_for(look)
        number = min(max(number, least), most)
        if number > look.wanted:
            self._spare_since, self._called_at = None, look.now_s
            if self._more_since is None:
                self._more_since = look.now_s
            if look.now_s - self._more_since < self._settings.upscale_delay_s:
                return Decision(look.wanted, reason)
            self._more_since = None
            return Decision(number, reason)
        is_pause = reason == "idle" and look.now_s - self._called_at < self._settings.downscale_delay_s
        if look.wanted or not is_pause:
            self._more_since = None
        if number == look.wanted:
            self._spare_since = None
            return Decision(number, reason)
        if self._spare_since is None:
            self._spare_since = look.now_s
        if look.now_s - self._spare_since < self._settings.downscale_delay_s:
            return Decision(look.wanted, reason)
        self._spare_since = look.now_s
        return Decision(look.wanted - 1, reason)

    def _called_for(self, look: PoolLook) -> tuple[int, str]:
        assert look.work is not None
        busy = [work for work in look.work if work.is_busy]
        if not busy:
            return 0, "idle"
        taken = math.ceil(len(busy) / self._settings.targets_per_drafter)
        paid = self._paid(busy)
        if paid is None or paid >= taken:
            self._unpaid_since = self._trial_until = None
            return taken, "targets"
        if paid >= 1:
            self._unpaid_since = self._trial_until = None
            return paid, "gain"
        return (1, "probe") if self._is_trial(look) else (0, "gain")

    def _paid(self, busy: Sequence[Work]) -> int | None:
        """Drafters that gain what they cost; None: not known."""
        known = [work for work in busy if work.plain_rate > 0]
        if not known:
            return None
        gain = fmean(max(work.rate - work.plain_rate, 0.0) for work in known) * len(busy)
        cost = self._settings.worth * self._accelerators * fmean(work.plain_rate for work in known)
        if cost == 0:
            return None if gain > 0 else 0
        return int(gain / cost)

    def _is_trial(self, look: PoolLook) -> bool:
        """None pays by what is known. Whether one is to be there, to see."""
        if self._trial_until is not None:
            if self._trial_until == math.inf and look.running:
                self._trial_until = look.now_s + TRIAL_S
            if look.now_s < self._trial_until:
                return True
            self._trial_until, self._unpaid_since = None, look.now_s
        if self._unpaid_since is None or look.wanted:
            # While one is there it is known what it gains.
            self._unpaid_since = look.now_s
        if look.now_s - self._unpaid_since < self._settings.probe_s:
            return False
        self._trial_until = math.inf
        return True
