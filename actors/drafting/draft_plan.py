"""What the drafter asks its engine's ranks to run: plain data, sent once a round rather than once a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PlanRow:
    """One sequence's part of a plan.

    num_computed: leading tokens with valid KV; num_tokens - num_computed tokens are fed in the first step.
    new_block_ids: KV blocks to append (for a sequence that starts: all of them), one list per KV cache group.
    num_drafts: tokens to draft. 0: a prefill chunk of num_scheduled tokens, nothing is sampled that counts.
    """

    request_id: str
    num_computed: int
    num_scheduled: int
    new_block_ids: tuple[list[int], ...] | None
    num_drafts: int
    start_token_ids: list[int] | None = None
    """Set when the sequence is new to the ranks: its committed tokens."""

    rewrite_from: int | None = None
    """Set when the committed tokens differ from what the ranks hold: replace from here on ..."""

    rewrite_token_ids: list[int] = field(default_factory=list)
    """... with these."""


@dataclass(slots=True)
class DraftPlan:
    rows: list[PlanRow] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Sequences whose state the ranks drop first."""
