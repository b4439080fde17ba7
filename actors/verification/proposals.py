"""Which drafts can be believed. A drafter's mistake costs its request speculation, never correctness."""

from __future__ import annotations

from torch import Tensor

Q_SUM_TOLERANCE = 1e-3


def valid_ids(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """bool [D]: the id exists. draft_ids: int64 [D]."""
    return draft_ids.clamp(0, vocab_size - 1) == draft_ids


def valid_q(draft_ids: Tensor, q_ids: Tensor, q_probs: Tensor, vocab_size: int) -> Tensor:
    """bool [D]: the row of q is a distribution that the draft can have been sampled from: ids in range, none twice;
    probabilities finite, not negative, summing to one within 1e-3; the draft's own above 0.

    draft_ids: int64 [D]; q_ids: int64 [D, n]; q_probs: float32 [D, n].
    """
    in_range = valid_ids(q_ids, vocab_size).all(-1)
    ordered = q_ids.sort(-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
    # Written so that NaN fails.
    proper = (q_probs >= 0).all(-1) & ((q_probs.sum(-1) - 1).abs() <= Q_SUM_TOLERANCE)
    drawn = ((q_ids == draft_ids.unsqueeze(1)) & (q_probs > 0)).any(-1)
    return in_range & distinct & proper & drawn


def leading(true: Tensor) -> Tensor:
    """How many stand before the first that is not true: int64 [B]. true: bool [B, K]."""
    return true.cumprod(-1).sum(-1)
