"""How likely each outcome of a verification is: the drafter's own probabilities, corrected by experience. Pure.

An outcome is reached when every draft before its position is accepted, and taken when the token there is not. Both
frequencies are counted against what the drafter's confidence predicted, so a drafter that is too sure of itself is
believed less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.drafting.line import Drawn

_BINS = 10
_PRIOR_WEIGHT = 8.0
_FADE_AT = 2000.0


class _Frequency:
    """Hits over trials, pulled towards what was predicted while there are few; old ones fade."""

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
    """Verification goes along the main line up to `position` and has `token` there. value: its probability."""

    position: int
    token: int
    value: float


class OutcomeModel:
    """Kept by a drafter over all its sequences."""

    def __init__(self, num_alternatives: int) -> None:
        self._accepted = [_Frequency() for _ in range(_BINS)]
        self._alternative = [_Frequency() for _ in range(num_alternatives)]

    def acceptance(self, drawn: Drawn) -> float:
        """The probability that verification has this very token where it looks."""
        confidence = min(max(drawn.confidence, 0.0), 1.0)
        return self._accepted[min(int(confidence * _BINS), _BINS - 1)].given(confidence)

    def outcomes(self, reach: float, position: int, drawn: Drawn) -> list[Outcome]:
        """The alternatives at a position that verification reaches with probability `reach`."""
        rejected = reach * (1 - self.acceptance(drawn))
        found = []
        for rank, (token, probability) in enumerate(drawn.alternatives[: len(self._alternative)]):
            share = self._alternative[rank].given(self._predicted(drawn, probability))
            found.append(Outcome(position, token, rejected * share))
        return found

    def observe(self, drawn: Sequence[Drawn | None], token_ids: Sequence[int]) -> None:
        """drawn: the main line's tokens where verification chose token_ids, as far as they were drawn; the first that
        differs ends the comparison."""
        for entry, token in zip(drawn, token_ids, strict=False):
            if entry is None:
                return
            confidence = min(max(entry.confidence, 0.0), 1.0)
            same = entry.token == token
            self._accepted[min(int(confidence * _BINS), _BINS - 1)].add(same)
            if not same:
                for rank, (other, _) in enumerate(entry.alternatives[: len(self._alternative)]):
                    self._alternative[rank].add(other == token)
                return

    @staticmethod
    def _predicted(drawn: Drawn, probability: float) -> float:
        return min(probability / max(1 - drawn.confidence, 1e-6), 0.95)
