"""Acceptance of rounds of K drafts along texts that the target wrote itself.

Such a text is what speculative decoding would have committed, so rounds are walked along it exactly: each of its tokens
was an accepted draft, the token after a rejection, or the bonus token of a round. A forward pass over the text tells
what a greedy drafter proposes at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from outrider.actors.learning.texts import Text
    from outrider.actors.learning.train import Trainer


class Tally:
    """Counts over texts, of rounds of k drafts."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.rounds = 0
        self.reached, self.accepted = [0] * k, [0] * k
        """By position: rounds in which a draft there was decided on, all before it being accepted; and was accepted."""

    def add(self, matches: Sequence[bool]) -> None:
        """Walks along a text. matches: whether the draft is the token, at each of the answer but the first, which comes
        with the prompt. Rounds for which the rest of the text is too short are not counted."""
        start = 0
        while start + self.k <= len(matches):
            kept = 0
            while kept < self.k and matches[start + kept]:
                self.accepted[kept] += 1
                kept += 1
            for position in range(min(kept + 1, self.k)):
                self.reached[position] += 1
            self.rounds += 1
            start += kept + 1

    @property
    def by_position(self) -> list[float | None]:
        """Accepted of those that were decided on; None where none was."""
        return [a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Accepted drafts and the target's own token."""
        return 1.0 + (sum(self.accepted) / self.rounds if self.rounds else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those proposed, as vLLM counts it; those after a rejection count as not accepted."""
        return (self.tokens_per_round - 1.0) / self.k


@dataclass(frozen=True)
class Measured:
    tallies: list[Tally]
    """For 1 to K drafts a round."""

    overlap: float
    """Mean probability that a draft drawn at temperature 1 is accepted, at every token alike."""

    tokens: int


def measured(trainer: Trainer, texts: Sequence[Text], k: int) -> Measured:
    """Measures a drafter on greedy answers of the target's."""
    tallies, overlaps = [Tally(size) for size in range(1, k + 1)], []
    for same, overlap in trainer.drafted(texts):
        overlaps += overlap.tolist()
        for tally in tallies:
            tally.add(same.tolist()[1:])
    return Measured(tallies, float(np.mean(overlaps)), len(overlaps))
