"""From the acceptance of single tokens along a text to that of rounds of K drafts. Pure.

Of a text that the target itself has written, speculative decoding is walked exactly: the text is what it would have
committed, so each token of it was an accepted draft, the token after a rejection, or the bonus token of a round. Where
a draft x is drawn from q and accepted with probability min(1, p(x) / q(x)) (Leviathan et al., 2211.17192), a token x of
the text that a draft stood for was that draft with probability min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)). So every
token moves the round on with that probability, and starts another with the rest: no draft has to be drawn. Greedy and
coupled verification are the case in which that probability is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Tally:
    """Sums over texts, of rounds of at most k drafts."""

    k: int
    reached: NDArray[np.float64] = field(init=False)
    """By position, from 0: rounds in which a draft there was decided on, all before it being accepted."""

    accepted: NDArray[np.float64] = field(init=False)
    rounds: float = 0.0
    proposed: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.reached, self.accepted = np.zeros(self.k), np.zeros(self.k)

    def add(self, other: Tally) -> None:
        self.reached += other.reached
        self.accepted += other.accepted
        self.rounds += other.rounds
        self.proposed += other.proposed
        self.tokens += other.tokens

    @property
    def by_position(self) -> list[float | None]:
        """Accepted of those that were decided on; None where none was."""
        return [float(a / r) if r > 0 else None for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        """Accepted drafts and the target's own token."""
        return 1.0 + self._accepted_per_round

    @property
    def proposed_per_round(self) -> float:
        return self.proposed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of those proposed, as vLLM counts it; those after a rejection count as not accepted."""
        return self._accepted_per_round * self.rounds / self.proposed if self.proposed else 0.0

    @property
    def per_token(self) -> float:
        """Accepted drafts of those decided on."""
        return float(self.accepted.sum() / self.reached.sum()) if self.reached.sum() else 0.0

    @property
    def _accepted_per_round(self) -> float:
        return float(self.accepted.sum() / self.rounds) if self.rounds else 0.0


def walk(overlap: Sequence[float], moves_on: Sequence[float], k: int) -> Tally:
    """Rounds of k drafts along one text.

    overlap, moves_on: of each token of the answer but the first, which the prompt's own step gives. overlap: the
    probability that a draft in its place is accepted, before the token is known: sum min(p, q). moves_on: given the
    token. Rounds for which the rest of the text is too short are not counted.
    """
    length = len(moves_on)
    tally = Tally(k, tokens=length)
    at = np.zeros(k + 1)  # probability that this token stands at draft j of its round; k: it is the bonus token
    at[0] = 1.0
    for index, (share, moved) in enumerate(zip(overlap, moves_on, strict=True)):
        whole = np.where(index - np.arange(k) + k <= length, at[:k], 0.0)
        tally.rounds += whole[0]
        tally.reached += whole
        tally.accepted += whole * share
        ahead = np.empty(k + 1)
        ahead[1:] = at[:k] * moved
        ahead[0] = at[k] + at[:k].sum() * (1.0 - moved)
        at = ahead
    tally.proposed = k * tally.rounds
    return tally


def look_up(answer: Sequence[int], propose: Callable[[Sequence[int]], Sequence[int]], k: int) -> Tally:
    """Rounds of drafts that the text alone decides (q is one-hot), along one answer.

    propose: told the tokens that were committed last, gives at most k drafts. The first token of the answer comes with
    the prompt's own step. Whole rounds are counted, as in `walk`.
    """
    tally = Tally(k, tokens=len(answer) - 1)
    start, committed = 1, answer[:1]
    while start < len(answer):
        drafts = propose(committed)
        kept = 0
        while kept < len(drafts) and start + kept < len(answer) and drafts[kept] == answer[start + kept]:
            kept += 1
        if start + k <= len(answer):
            tally.rounds += 1
            tally.proposed += len(drafts)
            tally.accepted[:kept] += 1
            tally.reached[: min(kept + 1, len(drafts))] += 1
        committed = answer[start : start + kept + 1]
        start += kept + 1
    return tally


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step of the target's and of one of the drafter's."""

    target_ms: float
    draft_ms: float

    def in_turn(self, tokens_per_round: float, k: int) -> float:
        """Tokens a second against the target alone, where the target waits for every draft."""
        return tokens_per_round * self.target_ms / (self.target_ms + k * self.draft_ms)

    def hidden(self, tokens_per_round: float, k: int) -> float:
        """Likewise where all drafting is done ahead, while the target verifies: no deployment does better. The round's
        k drafts and a guess of the bonus token are k + 1 steps."""
        return tokens_per_round * self.target_ms / max(self.target_ms, (k + 1) * self.draft_ms)


@dataclass
class ByMode:
    """Rounds of one way to verify, for every number of drafts up to K."""

    tallies: list[Tally]
    overlaps: list[float] = field(default_factory=list)
    """At every token alike: the probability that a draft there is accepted. Of draft models only."""

    moves: list[list[float]] = field(default_factory=list)
    """Of each text, at every token but the first: the probability that a draft moved the round on. Likewise."""

    chosen: dict[str, int] | None = None
    """Of several drafters, whose drafts were sent in how many rounds of K."""

    @staticmethod
    def up_to(k: int) -> ByMode:
        return ByMode([Tally(size) for size in range(1, k + 1)])

    def walk(self, overlap: list[float], moves_on: list[float]) -> None:
        self.overlaps += overlap
        self.moves.append(moves_on)
        for tally in self.tallies:
            tally.add(walk(overlap, moves_on, tally.k))

    def document(self, times: StepTimes | None) -> dict[str, Any]:
        rows = []
        for tally in self.tallies:
            row: dict[str, Any] = {
                "k": tally.k,
                "tokens_per_round": tally.tokens_per_round,
                "accepted_per_round": tally.tokens_per_round - 1.0,
                "proposed_per_round": tally.proposed_per_round,
                "acceptance_rate": tally.acceptance_rate,
            }
            if times is not None:
                row["speedup_in_turn"] = times.in_turn(tally.tokens_per_round, tally.k)
                row["speedup_hidden"] = times.hidden(tally.tokens_per_round, tally.k)
            rows.append(row)
        last = self.tallies[-1]
        return {
            "acceptance_rate": last.acceptance_rate,
            "per_token_acceptance": last.per_token,
            "by_position": last.by_position,
            "rounds": last.rounds,
            "overlap": sum(self.overlaps) / len(self.overlaps) if self.overlaps else None,
            "by_k": rows,
            **({} if self.chosen is None else {"chosen": self.chosen}),
        }
