"""Tests whether tokens are distributed as a target's own.

Counts where among the likeliest of target and drafter they are, against what the target's probabilities say.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIE = 1e-4
"""Two implementations round float32 logits differently, by some 1e-5: what is this close to the last of the top_k may
be among them. In some 6,000 tokens, one in ten runs would draw such a one."""

MIN_EXPECTED = 8.0
LIMIT = 4.5
"""Standard deviations of the statistic."""


def cut_to_top(logits: Tensor, top_k: int) -> Tensor:
    """float64 [..., V] probabilities of the top_k likeliest, and of what is tied with the last. logits: [..., V], by
    their temperature."""
    logits = logits.double()
    least = logits.topk(top_k).values[..., -1:]
    return logits.masked_fill(logits < least - TIE, -torch.inf).softmax(-1)


def ranks(probs: Tensor, top_k: int) -> Tensor:
    """int64, same shape: each token's place among the top_k likeliest, top_k for all others."""
    order = probs.argsort(dim=-1, descending=True)
    places = torch.arange(probs.shape[-1]).clamp_max(top_k).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def z_score(tokens: Tensor, p: Tensor, q: Tensor, top_k: int) -> float:
    """Return the z score of the chi-square statistic over (place in p, place in q).

    Rows differ in p, which makes it conservative.

    Args:
        tokens: int64 [...].
        p, q: float64 [..., V].
    """
    cell = ranks(p, top_k) * (top_k + 1) + ranks(q, top_k)
    cells = (top_k + 1) ** 2
    expected = torch.zeros(cells, dtype=torch.float64).scatter_add_(0, cell.flatten(), p.flatten())
    found = cell.gather(-1, tokens.unsqueeze(-1)).flatten().bincount(minlength=cells)
    enough = expected >= MIN_EXPECTED
    statistic = ((found - expected) ** 2 / expected)[enough].sum()
    freedom = int(enough.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
