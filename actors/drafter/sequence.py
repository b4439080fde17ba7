"""All that a drafter knows of one request, from its first message to its close. Pure.

A drafting method adds what it needs in a subclass of its own (`model_sequence.py`, `ngram.py`, `suffix.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from outrider.actors.observability import logs
from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftSampling,
    Open,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode

SequenceKey = tuple[int, int]
"""(link, request handle): unique over every target linked to one drafter."""


class Sequence:
    """Guarded by the draft loop's lock, as everything of a proposer is."""

    def __init__(self, key: SequenceKey) -> None:
        self.key = key
        self.name: str | None = None
        """The id by which the engine knows the request, if its verifier says it."""

        self.sampling = DraftSampling()
        """How its drafts are to be drawn."""

        self.num_speculative_tokens = 0
        self.text: list[int] = []
        """The prompt as far as it has arrived; once that is whole, every committed token."""

        self.is_open = False
        """The prompt is whole, and the proposer has it."""

        self.num_wanted = self.num_on_miss = 0
        """Of the last commit, see Commit."""

        self.asked_len: int | None = None
        """Of the commit that waits for its answer: the length it led to. None: none waits."""

        self.asked_at = 0.0
        """When that commit came."""

        self.turn = 0
        """Its place among all commits. One that overtakes another keeps the other's, so nobody waits for ever."""

    @property
    def committed_len(self) -> int:
        return len(self.text)

    def about(self) -> Mapping[str, str]:
        """``extra`` of a log line about it; {} when its verifier names none."""
        return {} if self.name is None else logs.about(self.name)

    @property
    def is_greedy(self) -> bool:
        """Its tokens are the target's likeliest ones."""
        return self.sampling.mode is Mode.GREEDY

    @property
    def next_offset(self) -> int:
        """Of the next piece of its prompt. An open sequence expects none but the first of another life."""
        return 0 if self.is_open else len(self.text)

    def add_prompt(self, piece: Open) -> bool:
        """Returns whether the prompt is whole now. The first piece's sampling counts: only that has the biases."""
        if piece.offset == 0:
            self.sampling = piece.sampling
        self.num_speculative_tokens = piece.num_speculative_tokens
        self.text.extend(piece.token_ids)
        self.is_open = len(self.text) >= piece.prompt_len
        return self.is_open

    def commit(self, commit: Commit) -> None:
        """Take committed tokens, which continue the text."""
        self.text.extend(commit.token_ids)
        self.num_wanted, self.num_on_miss = commit.num_wanted, commit.num_on_miss

    def drafts(self, token_ids: list[int], q: SparseQ | None = None, origin: DraftOrigin = DraftOrigin.MISS) -> Answer:
        """The answer to the last commit: up to K token ids that continue the text.

        q: what they were drawn from; None: each was the only choice (a one-hot q), or verification needs no q.
        """
        return Answer(self, Proposals(self.key[1], len(self.text), token_ids, ProposalStatus.OK, q, origin))

    def no_drafts(self, status: ProposalStatus, committed_len: int | None = None) -> Answer:
        """committed_len: of the commit that is answered; None: of the text as it is."""
        length = len(self.text) if committed_len is None else committed_len
        return Answer(self, Proposals(self.key[1], length, [], status))


class Answer(NamedTuple):
    """What is to be sent, and about which sequence: its link is where it goes."""

    sequence: Sequence
    proposals: Proposals


class Foreseen(NamedTuple):
    """Likewise, before anybody asks."""

    sequence: Sequence
    ahead: PrefetchedProposal
