"""Decides whether a version of a drafter takes the place of another, by texts that neither was trained on. Pure.

Both versions are scored on the same texts, so how hard a text is cancels out: the mean of the paired differences
decides, and how far it may be off. Texts are few, so the limit is Student's, one side, 95%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_TEXTS = 12
"""The least held-out texts, of different prompts, for a decision."""

MOST_LOST = 0.02
"""Acceptance that a version may lose on older texts: in the mean against the version that serves, and with confidence
on general texts against the drafter as it was loaded, since small losses would add up over versions."""

_STUDENT_95 = 1.8  # for 11 degrees of freedom, those of LEAST_TEXTS; for more it is less


@dataclass(frozen=True)
class Difference:
    """Holds the difference of acceptance per token: its mean over texts and its margin of error."""

    mean: float
    margin: float
    texts: int

    @staticmethod
    def of(new: Sequence[float], old: Sequence[float]) -> Difference:
        """Compares the acceptance of two versions on the same texts."""
        each = np.subtract(new, old)
        if len(each) < 2:
            return Difference(float(each.sum()), math.inf, len(each))
        margin = _STUDENT_95 * each.std(ddof=1) / math.sqrt(len(each))
        return Difference(float(each.mean()), float(margin), len(each))

    @property
    def is_gain(self) -> bool:
        """Returns whether the difference is a gain with confidence. NaN is none."""
        return self.texts >= LEAST_TEXTS and self.mean - self.margin > 0

    @property
    def is_loss(self) -> bool:
        """Returns whether the difference is a loss with confidence."""
        return self.texts >= LEAST_TEXTS and self.mean + self.margin < 0

    def row(self) -> dict[str, Any]:
        """Returns plain values that JSON can hold; margin None: too few texts to say."""
        mean, margin = (value if math.isfinite(value) else None for value in (self.mean, self.margin))
        return {"mean": mean or 0.0, "margin": margin, "texts": self.texts}


@dataclass(frozen=True)
class Verdict:
    """Holds the gate's decision. reason: ``gain`` if a version passes, or ``no_texts``, ``not_finite``, ``no_gain`` or
    ``forgets``."""

    reason: str
    recent: Difference | None = None
    past: Difference | None = None
    general: Difference | None = None

    @property
    def adopted(self) -> bool:
        return self.reason == "gain"

    @property
    def is_bad(self) -> bool:
        """Returns whether to stop training from here. A version that forgets may still recover."""
        return self.reason == "not_finite" or (self.recent is not None and self.recent.is_loss)

    def row(self) -> dict[str, Any]:
        """Returns plain values."""
        texts = {"recent": self.recent, "past": self.past, "general": self.general}
        return {"reason": self.reason, **{name: each and each.row() for name, each in texts.items()}}


def judge(recent: Difference, past: Difference, general: Difference | None = None) -> Verdict:
    """Decides on a version.

    recent, past: against the version that serves, on the latest texts and on a sample of all. general: against the
    drafter as it was loaded, on general texts, where there are any. Whether too much may be lost there is asked last:
    of next to no change little is certain, and learning would never begin.
    """
    older = [past] if general is None else [past, general]
    if recent.texts < LEAST_TEXTS:
        reason = "no_texts"
    elif not all(math.isfinite(each.mean) for each in (recent, *older)):
        reason = "not_finite"
    elif past.is_loss or any(each.mean < -MOST_LOST for each in older):
        reason = "forgets"
    elif not recent.is_gain:
        reason = "no_gain"
    elif general is not None and general.mean - general.margin < -MOST_LOST:
        reason = "forgets"
    else:
        reason = "gain"
    return Verdict(reason, recent, past, general)
