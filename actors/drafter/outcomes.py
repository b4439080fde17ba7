"""Estimates how likely an outcome of verification is, and what another row costs a step.
Imports neither vLLM, Ray nor torch.

The drafter measures both over all its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.actors.drafter.engine import Drawn

_BINS = 10
_PRIOR_WEIGHT = 8.0
USUAL_ACCEPTANCE = 0.7
"""Acceptance rate of a draft that is assumed before any was verified."""

_FADE_AT = 2000.0


class Frequency:
    """Estimates hits over trials, close to what was predicted while there are few. Old ones fade."""

    def __init__(self) -> None:
        self._trials, self._hits = 0.0, 0.0

    def add(self, hits: float, trials: float = 1.0) -> None:
        self._trials += trials
        self._hits += hits
        if self._trials > _FADE_AT:
            self._trials, self._hits = self._trials / 2, self._hits / 2

    def given(self, predicted: float) -> float:
        return (self._hits + _PRIOR_WEIGHT * predicted) / (self._trials + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome of verification: it follows the main line up to `position` and has `token` there. value: its
    probability."""

    position: int
    token: int
    value: float


class OutcomeModel:
    """Estimates how likely each outcome of a verification is: the drafter's own probabilities, corrected by experience.

    An outcome is reached when every draft before its position is accepted, and taken when the token there is not. Both
    frequencies are counted against what the drafter's confidence predicted, so a drafter that is too sure of itself is
    believed less.
    """

    def __init__(self, num_alternatives: int) -> None:
        self._accepted = [Frequency() for _ in range(_BINS)]
        self._any_accepted = Frequency()
        self._alternative = [Frequency() for _ in range(num_alternatives)]

    def acceptance(self, drawn: Drawn) -> float:
        """Returns the probability that verification has this very token where it looks."""
        confidence = min(max(drawn.confidence, 0.0), 1.0)
        return self._accepted[min(int(confidence * _BINS), _BINS - 1)].given(confidence)

    @property
    def usual_acceptance(self) -> float:
        """The acceptance rate of any draft, whatever the confidence."""
        return self._any_accepted.given(USUAL_ACCEPTANCE)

    def outcomes(self, reach: float, position: int, drawn: Drawn) -> list[Outcome]:
        """Returns the alternatives at a position that verification reaches with probability `reach`."""
        rejected = reach * (1 - self.acceptance(drawn))
        found = []
        for rank, (token, probability) in enumerate(drawn.alternatives[: len(self._alternative)]):
            share = self._alternative[rank].given(self._predicted(drawn, probability))
            found.append(Outcome(position, token, rejected * share))
        return found

    def observe(self, drawn: Sequence[Drawn | None], token_ids: Sequence[int]) -> None:
        """Counts a verification, up to the first difference.

        Args:
            drawn: the main line's tokens where verification chose token_ids, as far as they were drawn.
        """
        for entry, token in zip(drawn, token_ids, strict=False):
            if entry is None:
                return
            confidence = min(max(entry.confidence, 0.0), 1.0)
            same = entry.token == token
            self._accepted[min(int(confidence * _BINS), _BINS - 1)].add(same)
            self._any_accepted.add(same)
            if not same:
                for rank, (other, _) in enumerate(entry.alternatives[: len(self._alternative)]):
                    self._alternative[rank].add(other == token)
                return

    @staticmethod
    def _predicted(drawn: Drawn, probability: float) -> float:
        return min(probability / max(1 - drawn.confidence, 1e-6), 0.95)


_FADE, _FORGET = 0.98, 0.995
_MIN_SHARE, _MAX_SHARE = 0.004, 0.2
_PRIOR_SHARE = 0.02


class StepCost:
    """Estimates what a step takes, and what another row adds to it, by an exponentially faded least-squares fit of
    seconds over rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0
        self.row_share = _PRIOR_SHARE
        """The share of a step's time that one more row adds. A row whose reach probability is below this share of the
        sum over the step's rows costs more than it brings. While all steps have as many rows it decays slowly, so that
        rows are tried again after a wrong estimate."""

    def observe(self, rows: int, seconds: float) -> None:
        self._weight = self._weight * _FADE + 1
        self._rows = self._rows * _FADE + rows
        self._seconds = self._seconds * _FADE + seconds
        self._rows_squared = self._rows_squared * _FADE + rows * rows
        self._product = self._product * _FADE + rows * seconds
        variance = self._rows_squared * self._weight - self._rows**2
        if self.mean_s <= 0 or variance < 0.05 * self._weight**2:
            share = self.row_share * _FORGET
        else:
            share = (self._product * self._weight - self._rows * self._seconds) / variance / self.mean_s
        self.row_share = min(max(share, _MIN_SHARE), _MAX_SHARE)

    @property
    def mean_s(self) -> float:
        """Returns the duration of a recent step; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0
