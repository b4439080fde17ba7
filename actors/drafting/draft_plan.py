"""What the drafter asks its engine's ranks to run: plain data, sent once a round rather than once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.messages import DraftSampling


@dataclass(slots=True)
class PlanRow:
    """One sequence's part of a plan.

    num_computed: leading tokens with valid KV; num_tokens - num_computed tokens are fed in the first step.
    new_block_ids: KV blocks to append (for a sequence that starts: all of them), one list per KV cache group.
    num_drafts: tokens to draft, fixed before any is drawn. 0: a prefill chunk of num_scheduled tokens, nothing is
        sampled that counts. Else num_computed + num_scheduled is the committed length.
    sampling: how they are drawn.
    """

    request_id: str
    num_computed: int
    num_scheduled: int
    new_block_ids: tuple[list[int], ...] | None
    num_drafts: int
    sampling: DraftSampling = field(default_factory=DraftSampling)
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


@dataclass(slots=True)
class Drafted:
    """What was drafted for one row: num_drafts tokens, fewer only with bad_logits.

    q_ids: int32 [k, n], q_probs: float32 [k, n], what each was drawn from. None where no q need travel.
    bad_logits: the model gave NaN, infinity or nothing but minus infinity where the next token was to be drawn.
    """

    token_ids: list[int]
    q_ids: np.ndarray | None = None
    q_probs: np.ndarray | None = None
    bad_logits: bool = False
