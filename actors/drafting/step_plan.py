"""What the drafter asks its engine's ranks to run: one step over many rows. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.messages import DraftSampling


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token after a row is drawn: at `position`, as a draft of the round that starts at `round_start`.

    alternatives: how many other likely tokens to name.
    """

    sampling: DraftSampling
    position: int
    round_start: int
    alternatives: int = 0


@dataclass(slots=True)
class StepRow:
    """Tokens to feed, the first of them at position `start`.

    block_ids: the KV blocks of the row's sequence from its beginning, one list per KV cache group, enough for what is
        fed. Nobody changes a list: who gets another block gets another list.
    draws: what is drawn after token_ids; none for a prefill chunk.
    guesses: one fewer than draws; what these draws but the last are expected to be, fed in the same step. Draws count
        up to the first that is not its guess.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: tuple[Sequence[int], ...]
    draws: Sequence[Draw] = ()
    guesses: Sequence[int] = ()

    @property
    def num_fed(self) -> int:
        return len(self.token_ids) + len(self.guesses)


@dataclass(slots=True)
class StepPlan:
    """restores, copies: (from, to) KV blocks to copy before anything is fed, first the ones, then the others.
    vocabulary_changes: (slot, token id) of the cut output head, see DraftVocabulary."""

    rows: list[StepRow] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    vocabulary_changes: list[tuple[int, int]] = field(default_factory=list)
