"""Draws a drafter's tokens, so that verification knows exactly which distribution they were drawn from.

It chooses between `torch_draws.py` and `triton_draws.py` by device. The logits may be those of a `TokenSubset`: the
draws are then those of the whole vocabulary with the other tokens forbidden. All returned ids are token ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.actors.verification.constraints import Constraints, thresholds
from outrider.actors.verification.coupled import coupled_ranking
from outrider.actors.verification.search import TokenSubset, search_maxima, top_n
from outrider.actors.verification.torch_draws import DraftSample, draft_choice, greedy_choice
from outrider.cluster.modes import Mode


def sample_drafts(
    logits: Tensor,
    mode: Mode,
    constraints: Constraints,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    n: int = 64,
    subset: TokenSubset | None = None,
    alternatives: int = 0,
) -> DraftSample:
    """Draws one draft token for each of M rows, all of one mode.

    Args:
        logits: float32 [M, V] of the drafter.
        constraints: the rows' constraints. They raise acceptance and do not matter for exactness.
        seed: int64 [M], the request's, as the target has it.
        position: int64 [M], the position of the token drawn.
        round_start: int64 [M], the position of the first token of the round that the drafter expects to verify it. The
            target drops drafts of a round that starts elsewhere.
        n: the number of likeliest tokens that q has.
        subset: the tokens that the columns stand for, if not all.
        alternatives: how many other tokens to name. In GREEDY and COUPLED mode they are the next by logit, or by logit
            and noise, since the target's choice is likely one of these; in the other modes the likeliest under q.
            Greedy probabilities are those of temperature 1.
    """
    if mode is Mode.GREEDY:
        return greedy_choice(logits, subset, alternatives)
    maxima = search_maxima(logits) if logits.device.type == "cpu" else None
    temperature, threshold = constraints.temperature, None
    if mode is Mode.COUPLED or constraints.any:
        row_max = (logits if maxima is None else maxima).amax(-1)
        threshold = thresholds(logits, row_max, constraints) if constraints.any else None
        if mode is Mode.COUPLED:
            return _coupled(logits, temperature, threshold, row_max, maxima, seed, position, subset, alternatives)
    values, q_ids = top_n(logits, n, maxima)
    if subset is not None:
        q_ids = subset.ids[q_ids]
    choice = draft_choice
    if logits.device.type == "cuda":
        from outrider.actors.verification import triton_draws

        choice = triton_draws.draft_choice
    return choice(values, q_ids, temperature, threshold, seed, position, round_start, alternatives)


def _coupled(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    row_max: Tensor,
    maxima: Tensor | None,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    alternatives: int,
) -> DraftSample:
    """Draws in COUPLED mode. Shapes as in `sample_drafts`."""
    if logits.device.type == "cuda":
        ids, values = _triton_ranking(logits, temperature, threshold, seed, position, subset, alternatives + 1)
    else:
        count = alternatives + 1
        ids, values = coupled_ranking(
            logits, temperature, threshold, row_max, seed, position, count, maxima=maxima, subset=subset
        )
    usable = row_max.isfinite()
    if not alternatives:
        return DraftSample(ids[:, 0], usable=usable)
    weight = (logits - row_max.unsqueeze(1)).div_(temperature.unsqueeze(1)).exp_()
    if threshold is not None:
        weight.masked_fill_(logits < threshold.unsqueeze(1), 0.0)
    e = ((values - row_max.unsqueeze(1)) / temperature.unsqueeze(1)).exp()
    return DraftSample(ids[:, 0], None, None, ids[:, 1:], e / weight.sum(-1, keepdim=True), usable)


def _triton_ranking(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Returns what `coupled_ranking` returns, without waiting for the GPU: it masks each token to find the next."""
    from outrider.actors.verification import triton_draws

    token_ids = None if subset is None else subset.ids
    columns = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    tokens, values = [], []
    for place in range(count):
        chosen = triton_draws.coupled_choice(logits, temperature, threshold, seed, position, token_ids)
        if count == 1:
            return chosen.unsqueeze(1), logits.new_empty(len(logits), 0)
        hit = columns == chosen.unsqueeze(1)
        value = torch.where(hit, logits, -math.inf).amax(-1)
        left = value > -math.inf if threshold is None else value >= threshold
        tokens.append(torch.where(left, chosen, -1) if place else chosen)
        values.append(torch.where(left, value, -math.inf))
        logits = logits.masked_fill(hit, -math.inf)
    return torch.stack(tokens, dim=1), torch.stack(values, dim=1)
