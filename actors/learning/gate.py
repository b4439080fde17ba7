"""Whether a version of a drafter is better than another, by texts that neither was trained on. Pure.

Both are scored on the same texts, so that how hard a text is cancels out: what counts is the mean of the differences
and how sure it is. Texts are few, so the limit is Student's for one side and one in twenty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_TEXTS = 12
"""Held-out texts, of prompts of their own, without which nothing is decided."""

MOST_LOST = 0.02
"""Acceptance that a version may lose, in the mean, on what came before."""

_STUDENT_95 = 1.8
"""For 11 degrees of freedom, those of LEAST_TEXTS; for more it is less."""


@dataclass(frozen=True)
class Difference:
    """Of acceptance per token, from 0 to 1: the mean over texts, and how far it may be off (one side, 95%)."""

    mean: float
    margin: float
    texts: int

    @staticmethod
    def of(new: Sequence[float], old: Sequence[float]) -> Difference:
        """Acceptance of two versions on the same texts."""
        each = [n - o for n, o in zip(new, old, strict=True)]
        count = len(each)
        if count < 2:
            return Difference(sum(each), math.inf, count)
        mean = sum(each) / count
        variance = sum((one - mean) ** 2 for one in each) / (count - 1)
        return Difference(mean, _STUDENT_95 * math.sqrt(variance / count), count)

    @property
    def is_gain(self) -> bool:
        """With confidence. NaN is none."""
        return self.texts >= LEAST_TEXTS and self.mean - self.margin > 0

    @property
    def is_loss(self) -> bool:
        """Likewise."""
        return self.texts >= LEAST_TEXTS and self.mean + self.margin < 0


@dataclass(frozen=True)
class Verdict:
    """reason: ``gain``; or why not: ``no_texts``, ``not_finite``, ``no_gain``, ``forgets``."""

    adopted: bool
    reason: str
    recent: Difference | None = None
    past: Difference | None = None
    general: Difference | None = None

    @property
    def gains_and_forgets(self) -> bool:
        """It is better on one thing and worse on another: trained on, it may come to lose nothing."""
        return self.reason == "forgets" and self.recent is not None and self.recent.is_gain

    @property
    def is_bad(self) -> bool:
        """Nothing is to be had by training on from here."""
        worse = self.recent is not None and self.recent.is_loss
        return worse or self.reason == "not_finite" or (self.reason == "forgets" and not self.gains_and_forgets)


def judge(recent: Difference, past: Difference, general: Difference | None = None) -> Verdict:
    """recent: on the latest texts. past: on a sample of all so far. general: on general ones, where there are any; of
    these the drafter that learning began with is the other version, so that little by little nothing is lost either."""

    def verdict(adopted: bool, reason: str) -> Verdict:
        return Verdict(adopted, reason, recent, past, general)

    before = [past] if general is None else [past, general]
    if recent.texts < LEAST_TEXTS:
        return verdict(False, "no_texts")
    if not all(math.isfinite(each.mean) for each in (recent, *before)):
        return verdict(False, "not_finite")
    if past.is_loss or any(each.mean < -MOST_LOST for each in before):
        return verdict(False, "forgets")
    if not recent.is_gain:
        return verdict(False, "no_gain")
    return verdict(True, "gain")
