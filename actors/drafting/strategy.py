"""What a drafting method offers the drafter's loop."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from actors.messages import DraftSampling, ProposalStatus, SparseQ

SequenceKey = tuple[int, int]
"""(link, request handle): unique over every target linked to one drafter."""


@dataclass(slots=True)
class Draft:
    """The answer for one sequence: up to K token ids that continue its committed length.

    q: what they were drawn from; None: each was the only choice (a one-hot q), or verification needs no q.
    """

    key: SequenceKey
    base_committed_len: int
    token_ids: list[int]
    status: ProposalStatus
    q: SparseQ | None = None


class UnknownSequence(KeyError):
    """A commit for a sequence that is not open here or is at another length: the verifier must open it again."""


class DraftStrategy(Protocol):
    """Holds the sequences of all linked targets and drafts for many of them at once. Single-threaded.

    How many tokens are drafted may depend on anything before a token, never on the token itself: drafts that are
    kept or dropped for what they are no longer come from q, and rejection against q would be biased.
    """

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> bool:
        """A new sequence with its committed tokens (the prompt, or all of a resumed request's text).

        sampling: how its drafts are to be drawn. Drafts that are a function of the text alone may ignore it.
        Returns whether it can be drafted for at once, without prefill.
        """

    def commit(self, key: SequenceKey, base_committed_len: int, token_ids: list[int]) -> None:
        """Append committed tokens. Raises UnknownSequence."""

    def close(self, key: SequenceKey) -> None:
        """Forget a sequence and free what it holds. Unknown keys are ignored."""

    def draft(self, keys: Collection[SequenceKey]) -> list[Draft]:
        """Draft for many sequences as one batch. Sequences whose prefill is not done answer NOT_READY.

        Keys that did not fit in the batch get no answer: ask again.
        """

    def prefill(self) -> list[Draft] | None:
        """Run one bounded chunk of pending prefill. None: nothing to do. Otherwise a READY answer per sequence done."""

    def usage(self) -> dict[str, float]:
        """``num_sequences``, ``num_prefilling`` and ``kv_cache_usage`` (0..1)."""
