"""How a drafter draws its tokens, so that verification knows exactly what they were drawn from.

The logits may be those of some tokens only, a `TokenSubset`: the draws are then those of the whole vocabulary with the
other tokens forbidden. All ids given back are token ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.verification.constraints import Constraints, thresholds
from actors.verification.coupled import coupled_ranking
from actors.verification.draft_sample import DraftSample
from actors.verification.greedy_numpy import FEW_LOGITS, greedy_in_numpy, ranked_in_numpy
from actors.verification.mode import Mode
from actors.verification.philox import Role, uniform64
from actors.verification.tiles import SEARCH_TILE, argmax, at_least, search_maxima
from actors.verification.token_subset import TokenSubset

_NO_TOKEN = 2**62


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
    """One draft token for each of M rows, all of one mode.

    logits: float32 [M, V] of the drafter. constraints: of the rows; they only help acceptance. seed: int64 [M], the
    request's, as the target has it. position: int64 [M], of the token drawn. round_start: int64 [M], the position of
    the first token of the round that will verify it, as the drafter guesses it: a round is verified under the same
    start as it was drafted for, or its drafts are dropped. subset: the tokens that the columns stand for, if not all.

    alternatives: how many to name. Greedy and coupled, the target's choice, if it is another, is likely the next in
    line: the next logit, or logit and noise. Elsewhere it is a residual sample, and the likeliest under q come first.
    Greedy probabilities are those of temperature 1.
    """
    if mode is Mode.GREEDY:
        return greedy_drafts(logits, subset, alternatives)
    maxima = search_maxima(logits) if logits.device.type == "cpu" else None
    row_max = (logits if maxima is None else maxima).amax(-1)
    threshold = thresholds(logits, row_max, constraints) if constraints.any else None
    if mode is Mode.COUPLED:
        noise = (seed, position)
        return _coupled(logits, constraints.temperature, threshold, row_max, maxima, *noise, subset, alternatives)
    drawn = truncated(logits, constraints.temperature, threshold, seed, position, round_start, n, maxima)
    if alternatives:
        drawn = _with_alternatives(drawn, alternatives)
    if subset is None:
        return drawn
    assert drawn.q_ids is not None
    others = drawn.alternatives
    if others is not None:
        others = torch.where(others < 0, -1, subset.ids[others.clamp_min(0)])
    return DraftSample(subset.ids[drawn.ids], subset.ids[drawn.q_ids], drawn.q_probs, others, drawn.confidence)


def greedy_drafts(logits: Tensor, subset: TokenSubset | None = None, alternatives: int = 0) -> DraftSample:
    """`sample_drafts` where every row is greedy."""
    if logits.device.type == "cpu" and logits.numel() <= FEW_LOGITS:
        return greedy_in_numpy(logits, subset, alternatives)
    return greedy_in_torch(logits, subset, alternatives)


def greedy_ranking(
    logits: Tensor, subset: TokenSubset | None, alternatives: int
) -> tuple[list[list[int]], list[list[float]]]:
    """`greedy_drafts`, on the host: of each row the draft and the alternatives, and the probabilities of these."""
    if logits.device.type == "cpu" and logits.numel() <= FEW_LOGITS:
        token_ids = None if subset is None else subset.ids.numpy()
        ranked, shares = ranked_in_numpy(logits.numpy(), token_ids, alternatives)
        return ranked.tolist(), shares.tolist()
    sample = greedy_in_torch(logits, subset, alternatives)
    ids = sample.ids.unsqueeze(1)
    if sample.alternatives is None or sample.confidence is None:
        return ids.tolist(), []
    return torch.cat([ids, sample.alternatives], 1).tolist(), sample.confidence.tolist()


def likeliest(logits: Tensor, n: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What logits.topk(n) gives. logits: float32 [M, V]; maxima: what `search_maxima` gives, for a few tiles to do on a
    CPU, where topk is slow: n tiles have n logits as large as any outside of them."""
    rows, vocab_size = logits.shape
    n = min(n, vocab_size)
    if maxima is None or 2 * n > maxima.shape[1] or vocab_size % SEARCH_TILE or not logits.is_contiguous():
        values, ids = logits.topk(n, dim=-1)
        return values, ids
    tiles = maxima.topk(n, dim=-1, sorted=False).indices
    first = torch.arange(0, rows * maxima.shape[1], maxima.shape[1], device=logits.device).unsqueeze(1)
    inside = logits.view(-1, SEARCH_TILE).index_select(0, (first + tiles).flatten()).view(rows, -1)
    values, place = inside.topk(n, dim=-1)
    return values, tiles.gather(1, place // SEARCH_TILE) * SEARCH_TILE + place % SEARCH_TILE


def greedy_in_torch(logits: Tensor, subset: TokenSubset | None, alternatives: int) -> DraftSample:
    """What `greedy_in_numpy` gives, for many rows, and on a GPU."""
    maxima = search_maxima(logits)
    row_max = maxima.amax(-1)
    ids = argmax(logits, row_max, maxima) if subset is None else _argmax_by_id(logits, row_max, maxima, subset)
    if not alternatives:
        return DraftSample(ids)
    values, columns = likeliest(logits, alternatives + 1, maxima)
    e = (values - row_max.unsqueeze(1)).exp()
    probs = e / (logits - row_max.unsqueeze(1)).exp_().sum(-1, keepdim=True)
    ranked = columns if subset is None else subset.ids[columns]
    return DraftSample(ids, None, None, *_others(ids, probs[:, 0], ranked, probs, alternatives))


def _argmax_by_id(logits: Tensor, row_max: Tensor, maxima: Tensor, subset: TokenSubset) -> Tensor:
    """As `tiles.argmax`: the lowest token id among equals, wherever it stands."""
    if logits.device.type == "cpu":
        row, column = at_least(logits, maxima, row_max)
        lowest = torch.full((len(logits),), _NO_TOKEN)
        lowest = lowest.scatter_reduce(0, row, subset.ids[column], "amin")
    else:
        lowest = torch.where(logits == row_max.unsqueeze(1), subset.ids, _NO_TOKEN).amin(-1)
    return torch.where(lowest == _NO_TOKEN, subset.ids[-1], lowest)


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
    if logits.device.type == "cuda":
        ids, values = _triton_ranking(logits, temperature, threshold, seed, position, subset, alternatives + 1)
    else:
        count = alternatives + 1
        ids, values = coupled_ranking(
            logits, temperature, threshold, row_max, seed, position, count, maxima=maxima, subset=subset
        )
    if not alternatives:
        return DraftSample(ids[:, 0])
    weight = (logits - row_max.unsqueeze(1)).div_(temperature.unsqueeze(1)).exp_()
    if threshold is not None:
        weight.masked_fill_(logits < threshold.unsqueeze(1), 0.0)
    e = ((values - row_max.unsqueeze(1)) / temperature.unsqueeze(1)).exp()
    return DraftSample(ids[:, 0], None, None, ids[:, 1:], e / weight.sum(-1, keepdim=True))


def _triton_ranking(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """What `coupled_ranking` gives, without its host syncs: each token is taken out for the next to be found."""
    from actors.verification import triton_kernel

    token_ids = None if subset is None else subset.ids
    columns = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    tokens, values = [], []
    for place in range(count):
        chosen = triton_kernel.coupled_choice(logits, temperature, threshold, seed, position, token_ids)
        if count == 1:
            return chosen.unsqueeze(1), logits.new_empty(len(logits), 0)
        hit = columns == chosen.unsqueeze(1)
        value = torch.where(hit, logits, -math.inf).amax(-1)
        left = value > -math.inf if threshold is None else value >= threshold
        tokens.append(torch.where(left, chosen, -1) if place else chosen)
        values.append(torch.where(left, value, -math.inf))
        logits = logits.masked_fill(hit, -math.inf)
    return torch.stack(tokens, dim=1), torch.stack(values, dim=1)


def truncated(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    n: int,
    maxima: Tensor | None = None,
) -> DraftSample:
    """A draw from the n likeliest tokens, renormalised. With fewer than n tokens above the threshold, the others are
    listed at probability 0. Shapes as in `sample_drafts`; temperature, threshold: float32 [M]; maxima: what
    `search_maxima` gives, if the caller has it."""
    values, q_ids = likeliest(logits, n, maxima)
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


def _with_alternatives(drawn: DraftSample, alternatives: int) -> DraftSample:
    q_ids, q_probs = drawn.q_ids, drawn.q_probs
    assert q_ids is not None
    assert q_probs is not None
    prob = torch.where(q_ids == drawn.ids.unsqueeze(1), q_probs, 0.0).sum(-1)
    return DraftSample(drawn.ids, q_ids, q_probs, *_others(drawn.ids, prob, q_ids, q_probs, alternatives))


def _others(ids: Tensor, prob: Tensor, ranked: Tensor, probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """alternatives and confidence as in DraftSample, given the likeliest tokens and their probabilities, [M, m] each,
    of which the token drawn, ids [M] with probability prob [M], may be one."""
    short = count + 1 - ranked.shape[1]
    if short > 0:
        pad = (0, short)
        ranked = torch.nn.functional.pad(ranked, pad, value=-1)
        probs = torch.nn.functional.pad(probs, pad)
    passed = (ranked[:, :count] == ids.unsqueeze(1)).cumsum(-1)
    place = torch.arange(count, device=ids.device) + passed
    others, their_probs = ranked.gather(1, place), probs.gather(1, place)
    return torch.where(their_probs > 0, others, -1), torch.cat([prob.unsqueeze(1), their_probs], dim=1)
