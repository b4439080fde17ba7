"""Finds out where each token of an answer came from, by the scheduler's counts of each round.

vLLM gives the tokens of several rounds as one when their consumer is slow, and cuts tokens behind a stop string, so
rounds are logged as they come in and taken again by number of tokens. What does not add up is unknown, not guessed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

ACCEPTED, RECOVERED, BONUS, PLAIN, UNKNOWN = "accepted", "recovered", "bonus", "plain", "unknown"
"""The origins: an accepted draft; the target's token in place of a rejected draft; its token after drafts that were all
accepted; its token of a round without drafts; not known."""


@dataclass(frozen=True)
class SpeculationTotals:
    """Counts of one answer, from its start to the end of a round."""

    drafted_rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class TakenRounds:
    """Holds the origins of some tokens, and the number of their rounds; 0 rounds if that is not known."""

    origins: tuple[str, ...] = ()
    num_rounds: int = 0


def round_origins(num_tokens: int, before: SpeculationTotals, after: SpeculationTotals) -> tuple[str, ...]:
    """Returns the origins of a round's num_tokens tokens, by the counts before it and after it.

    Fewer tokens than the round decided is fine: the last ones were cut off.
    """
    rounds = after.drafted_rounds - before.drafted_rounds
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    if rounds not in (0, 1) or not 0 <= accepted <= drafted or num_tokens > accepted + 1 or (drafted and not rounds):
        return (UNKNOWN,) * num_tokens
    own = PLAIN if drafted == 0 else BONUS if accepted == drafted else RECOVERED
    return ((ACCEPTED,) * accepted + (own,))[:num_tokens]


@dataclass
class _Answer:
    totals: SpeculationTotals = field(default_factory=SpeculationTotals)
    rounds: deque[tuple[str, ...]] = field(default_factory=deque)
    """Not taken yet."""


class RoundLog:
    """Keeps the rounds of watched requests until their tokens are taken. Not thread-safe.

    speculating: whether the engine drafts at all; if not, every token is plain.
    """

    def __init__(self, speculating: bool) -> None:
        self._speculating = speculating
        self._requests: dict[str, dict[int, _Answer]] = {}

    def watch(self, request_id: str) -> None:
        self._requests[request_id] = {}

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def watches(self, request_id: str) -> bool:
        return request_id in self._requests

    def note(self, request_id: str, index: int, num_tokens: int, totals: SpeculationTotals | None) -> None:
        """Adds a round of answer `index` of a watched request. totals: at its end; None where nothing counts them."""
        answer = self._requests[request_id].setdefault(index, _Answer())
        if totals is None:
            origins = (UNKNOWN if self._speculating else PLAIN,) * num_tokens
        else:
            origins = round_origins(num_tokens, answer.totals, totals)
            answer.totals = totals
        if origins:
            answer.rounds.append(origins)

    def take(self, request_id: str, index: int, num_tokens: int) -> TakenRounds:
        """Returns the origins of an answer's next num_tokens tokens, which are all of one round or of several."""
        rounds = self._requests.get(request_id, {}).get(index, _Answer()).rounds
        origins: tuple[str, ...] = ()
        num_rounds = 0
        while rounds and len(origins) < num_tokens:
            origins += rounds.popleft()
            num_rounds += 1
        if len(origins) != num_tokens:
            return TakenRounds((UNKNOWN,) * num_tokens)
        return TakenRounds(origins, num_rounds)
