"""A sequence of the draft model's, and what the engine holds of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from actors.drafting.ngram import GrowingText
from actors.drafting.sequence import DraftSequence

CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""


@dataclass(eq=False, slots=True)
class Resident:
    """A sequence, and what the engine holds of it."""

    sequence: DraftSequence
    request_id: str
    retired: bool = False
    """Too long for the draft model: followed, so that commits stay known, but no longer in the engine."""

    appended_to: int = 0
    """Leading text tokens that the engine knows."""

    allocated_for: int = 0
    """Length of the text when blocks were last allocated."""

    allocated_to: int = 0
    """Positions below this have KV blocks."""

    blocks: tuple[list[int], ...] = ()
    """These blocks, one list per KV cache group."""

    index: GrowingText | None = None
    """Of the text, for guesses of draws."""

    asked: int = 0
    """Number of the commit that waits, or waited last."""

    announced: bool = False
    """READY has been sent, or need not be."""

    @property
    def can_draft(self) -> bool:
        sequence = self.sequence
        return not self.retired and sequence.committed_len - sequence.main.num_computed <= CATCH_UP_TOKENS
