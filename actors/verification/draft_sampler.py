"""How a drafter draws its tokens, so that verification knows exactly what they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.verification.constraints import Constraints, thresholds
from actors.verification.gumbel import coupled_choice
from actors.verification.mode import Mode
from actors.verification.philox import Role, uniform64
from actors.verification.tiles import argmax


@dataclass(frozen=True, eq=False)
class DraftSample:
    """ids: int64 [M]. q_ids: int64 [M, n] and q_probs: float32 [M, n], what the ids were drawn from; None when they
    were not drawn with noise that verification must know about (greedy, coupled)."""

    ids: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None


def sample_drafts(
    logits: Tensor,
    mode: Mode,
    constraints: Constraints,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    n: int = 64,
) -> DraftSample:
    """One draft token for each of M rows, all of one mode.

    logits: float32 [M, V] of the drafter. constraints: of the rows; they only help acceptance. seed: int64 [M], the
    request's, as the target has it. position: int64 [M], of the token drawn. round_start: int64 [M], the position of
    the first token of the round that will verify it, as the drafter guesses it: a round is verified under the same
    start as it was drafted for, or its drafts are dropped.
    """
    row_max = logits.amax(-1)
    if mode is Mode.GREEDY:
        return DraftSample(argmax(logits, row_max))
    threshold = thresholds(logits, row_max, constraints) if constraints.any else None
    if mode is Mode.COUPLED:
        return DraftSample(_coupled(logits, constraints.temperature, threshold, row_max, seed, position))
    return truncated(logits, constraints.temperature, threshold, seed, position, round_start, n)


def _coupled(
    logits: Tensor, temperature: Tensor, threshold: Tensor | None, row_max: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    if logits.device.type == "cuda":
        from actors.verification import triton_kernel

        return triton_kernel.coupled_choice(logits, temperature, threshold, seed, position)
    return coupled_choice(logits, temperature, threshold, row_max, seed, position)


def truncated(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    n: int,
) -> DraftSample:
    """A draw from the n likeliest tokens, renormalised. With fewer than n tokens above the threshold, the others are
    listed at probability 0. Shapes as in `sample_drafts`; temperature, threshold: float32 [M]."""
    values, q_ids = logits.topk(min(n, logits.shape[1]), dim=-1)
    scaled = values / temperature.unsqueeze(1)
    if threshold is not None:
        scaled = torch.where(values >= threshold.unsqueeze(1), scaled, -torch.inf)
    q_probs = scaled.softmax(-1)
    cumulative = q_probs.to(torch.float64).cumsum(-1)
    target = uniform64(seed, Role.DRAFT, position, round_start) * cumulative[:, -1]
    index = (cumulative <= target.unsqueeze(1)).sum(-1)
    last = (q_probs > 0).sum(-1) - 1  # topk is in descending order, so the zeros come last
    index = torch.minimum(index, last.clamp_min(0))
    return DraftSample(q_ids.gather(1, index.unsqueeze(1)).squeeze(1), q_ids, q_probs)
