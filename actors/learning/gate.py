"""Whether a version of a drafter is better than another, by texts that neither was trained on. Pure.

Both are scored on the same texts, so that how hard a text is cancels out: what counts is the mean of the differences
and how sure it is. Texts are few, so the limit is Student's for one side and one in twenty. What serves is looked back
at time and again: there one in twenty is the chance that an equally good version is ever found worse, in all looks.

Against the version that serves, small losses cannot be told from none, and they add up. So the drafter that learning
began with is the other one that a version is held against, and there the burden is the version's: not «no loss was
found», but «with confidence no more than that was lost», however many versions lie between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEAST_TEXTS = 12
"""Held-out texts, of prompts of their own, without which nothing is decided."""

MOST_LOST = 0.02
"""Acceptance that a version may lose on what came before: in the mean against the version that serves, with confidence
against the drafter that learning began with."""

_ONE_SIDE = 0.05
_SINCE_BEGUN = 0.01
"""The chance that what has lost more than that since learning began is taken for what has not, in one comparison. The
texts are much the same every time, so it is less than one in twenty: over forty comparisons it stays below that."""

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
    def may_lose(self) -> float:
        """The most that is lost, with the confidence that losses since learning began ask for; below 0: it gains.
        Infinite for fewer than two texts."""
        if self.texts < 2:
            return math.inf
        return self.margin / _STUDENT_95 * student_limit(_SINCE_BEGUN, self.texts - 1) - self.mean

    @property
    def is_loss(self) -> bool:
        """With confidence."""
        return self.texts >= LEAST_TEXTS and self.mean + self.margin < 0

    def is_loss_in(self, look: int) -> bool:
        """Likewise, in the so many-th look at two versions, from 1: of the one in twenty it may use
        1 / look / (look + 1), which makes 1 over all looks, however much their texts have in common."""
        if self.texts < LEAST_TEXTS:
            return False
        limit = student_limit(_ONE_SIDE / (look * (look + 1)), self.texts - 1)
        return self.mean + self.margin / _STUDENT_95 * limit < 0


def student_limit(chance: float, degrees: int) -> float:
    """What Student's t of so many degrees of freedom exceeds with that chance, by the normal one's (Abramowitz and
    Stegun, 26.7.5): from 11 degrees on within a hundredth down to chances of one in a hundred thousand."""
    z = NormalDist().inv_cdf(1 - chance)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


@dataclass(frozen=True)
class Verdict:
    """reason: ``gain``; or why not: ``no_texts``, ``not_finite``, ``no_gain``, ``forgets``."""

    adopted: bool
    reason: str
    recent: Difference | None = None
    past: Difference | None = None
    general: Difference | None = None
    past_begun: Difference | None = None

    @property
    def gains_and_forgets(self) -> bool:
        """It is better on one thing and worse on another: trained on, it may come to lose nothing."""
        return self.reason == "forgets" and self.recent is not None and self.recent.is_gain

    @property
    def is_bad(self) -> bool:
        """Nothing is to be had by training on from here."""
        worse = self.recent is not None and self.recent.is_loss
        return worse or self.reason == "not_finite" or (self.reason == "forgets" and not self.gains_and_forgets)


def judge(
    recent: Difference, past: Difference, general: Difference | None = None, past_begun: Difference | None = None
) -> Verdict:
    """recent: on the latest texts. past: on a sample of all so far. general: on general ones, where there are any; of
    these the drafter that learning began with is the other version, so that little by little nothing is lost either.
    past_begun: the same on the sample of all so far.

    Whether too much may be lost since then is asked last, of what gains: before, it would keep learning from beginning,
    since of next to no change little is certain."""

    def verdict(adopted: bool, reason: str) -> Verdict:
        return Verdict(adopted, reason, recent, past, general, past_begun)

    since_begun = [each for each in (general, past_begun) if each is not None]
    before = [past, *since_begun]
    if recent.texts < LEAST_TEXTS:
        return verdict(False, "no_texts")
    if not all(math.isfinite(each.mean) for each in (recent, *before)):
        return verdict(False, "not_finite")
    if past.is_loss or any(each.mean < -MOST_LOST for each in before):
        return verdict(False, "forgets")
    if not recent.is_gain:
        return verdict(False, "no_gain")
    if any(each.may_lose > MOST_LOST for each in since_begun):
        return verdict(False, "forgets")
    return verdict(True, "gain")
