"""Computes the acceptance of rounds of K drafts along texts that the target generated.

Speculative decoding would have committed the same text, so the rounds are exact: each token is an accepted draft, the
token after a rejection, or the bonus token of a round. One forward pass over the text gives a greedy drafter's drafts
of the rounds that may start at each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from outrider.actors.learning.texts import Text
    from outrider.actors.learning.train import Trainer


class Tally:
    """Counts rounds of k drafts over texts."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.rounds = 0
        self.reached, self.accepted = [0] * k, [0] * k
        """By position: rounds in which all drafts before it were accepted, and in which it was accepted too."""

    def add(self, matches: Sequence[Sequence[bool]]) -> None:
        """Counts the rounds of one text, without those that its end would cut short.

        Args:
            matches: Whether the drafts equal the tokens in a round that starts at each token of the answer but the
                first; at least k drafts each.
        """
        start = 0
        while start + self.k <= len(matches):
            kept = 0
            while kept < self.k and matches[start][kept]:
                self.accepted[kept] += 1
                kept += 1
            for position in range(min(kept + 1, self.k)):
                self.reached[position] += 1
            self.rounds += 1
            start += kept + 1

    @property
    def by_position(self) -> list[float | None]:
        """Share of accepted drafts by position; None where none was reached."""
        return [a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Mean number of accepted drafts, plus one for the target's own token."""
        return 1.0 + (sum(self.accepted) / self.rounds if self.rounds else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed drafts, as vLLM counts them."""
        return (self.tokens_per_round - 1.0) / self.k


@dataclass(frozen=True)
class Measured:
    """Holds the acceptance of a drafter."""

    tallies: list[Tally]
    """Counts for 1 to K drafts a round."""

    overlap: float
    """Mean probability over all tokens that a draft drawn at temperature 1 is accepted."""

    tokens: int


def measured(trainer: Trainer, texts: Sequence[Text], k: int) -> Measured:
    """Measures a drafter on greedy answers of the target's."""
    tallies, overlaps = [Tally(size) for size in range(1, k + 1)], []
    for same, overlap in trainer.drafted(texts):
        overlaps += overlap[:, 0].tolist()
        matches = same.numpy()[1:]
        if trainer.num_drafts == 1:  # a round's next draft is the first one of a round that starts a token later
            matches = sliding_window_view(np.pad(matches[:, 0], (0, k - 1)), k) if len(matches) else matches
        for tally in tallies:
            tally.add(matches.tolist())
    return Measured(tallies, float(np.mean(overlaps)), len(overlaps))
