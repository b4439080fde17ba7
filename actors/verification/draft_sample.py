"""What a drafter drew, and what it drew from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftSample:
    """ids: int64 [M]. q_ids: int64 [M, n] and q_probs: float32 [M, n], what the ids were drawn from; None when they
    were not drawn with noise that verification must know about (greedy, coupled).

    alternatives: int64 [M, A], other tokens that verification may choose, likeliest first, -1 where there is none.
    confidence: float32 [M, 1 + A], the drafter's probabilities of the token drawn and of these. None unless asked for.
    """

    ids: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None
    alternatives: Tensor | None = None
    confidence: Tensor | None = None
