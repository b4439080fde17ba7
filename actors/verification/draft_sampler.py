"""How a drafter draws its tokens, so that verification knows exactly what they were drawn from.

The logits may be those of some tokens only, a `TokenSubset`: the draws are then those of the whole vocabulary with the
other tokens forbidden. All ids given back are token ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.actors.verification.constraints import Constraints, thresholds
from outrider.actors.verification.coupled import coupled_ranking
from outrider.actors.verification.noise import Role, uniform64
from outrider.actors.verification.search import TokenSubset, argmax, likeliest, search_maxima
from outrider.cluster.modes import Mode

_NO_TOKEN = 2**62


@dataclass(frozen=True, eq=False)
class DraftSample:
    """What was drawn for M rows.

    ids: int64 [M]. q_ids: int64 [M, n] and q_probs: float32 [M, n], what the ids were drawn from; None when they were
    not drawn with noise that verification must know about (greedy, coupled).

    alternatives: int64 [M, A], other tokens that verification may choose, likeliest first, -1 where there is none.
    confidence: float32 [M, 1 + A], the drafter's probabilities of the token drawn and of these. None unless asked for.
    usable: bool [M], False where the logits gave no distribution to draw from (NaN, infinity, nothing but minus
    infinity): the rest of such a row means nothing.
    """

    ids: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None
    alternatives: Tensor | None = None
    confidence: Tensor | None = None
    usable: Tensor | None = None


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
    temperature, threshold = constraints.temperature, None
    if mode is Mode.COUPLED or constraints.any:
        row_max = (logits if maxima is None else maxima).amax(-1)
        threshold = thresholds(logits, row_max, constraints) if constraints.any else None
        if mode is Mode.COUPLED:
            return _coupled(logits, temperature, threshold, row_max, maxima, seed, position, subset, alternatives)
    noise = (seed, position, round_start)
    return truncated(logits, temperature, threshold, *noise, n, maxima, subset, alternatives)


def greedy_drafts(logits: Tensor, subset: TokenSubset | None = None, alternatives: int = 0) -> DraftSample:
    """`sample_drafts` where every row is greedy."""
    return (greedy_in_numpy if logits.device.type == "cpu" else greedy_in_torch)(logits, subset, alternatives)


def greedy_in_numpy(logits: Tensor, subset: TokenSubset | None, alternatives: int) -> DraftSample:
    """The likeliest tokens, the lowest id first among equals for the draft itself. For the CPU: numpy's calls cost less
    than torch's, its argmax reads a row once, and row by row the exponentials stay in cache."""
    z, ids = logits.numpy(), None if subset is None else subset.ids.numpy()
    rows, vocab_size = z.shape
    columns = z.argmax(1)[:, None]
    top = z[np.arange(rows), columns[:, 0]]
    if ids is not None:
        # Columns stand in any order, so the first of equals need not have the lowest id.
        for row in range(rows):
            equals = np.flatnonzero(z[row] == top[row])
            if len(equals) > 1:
                columns[row] = equals[ids[equals].argmin()]
    usable = torch.from_numpy(np.isfinite(top))
    if not alternatives:
        chosen = columns[:, 0] if ids is None else ids[columns[:, 0]]
        return DraftSample(torch.from_numpy(chosen), usable=usable)
    columns = np.concatenate([columns, np.zeros((rows, alternatives), np.int64)], axis=1)
    shares = np.zeros(columns.shape, np.float32)
    left = np.empty(vocab_size, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are bad
        for row in range(rows):
            np.exp(np.subtract(z[row], top[row], out=left), out=left)
            total, best = left.sum(), columns[row, 0]
            shares[row, 0] = left[best]
            for place in range(1, min(1 + alternatives, vocab_size)):
                left[best] = -1.0
                columns[row, place] = best = left.argmax()
                shares[row, place] = left[best]
            shares[row] /= total
    ranked, none_left = columns if ids is None else ids[columns], ~(shares[:, 1:] > 0.0)
    ranked[:, 1:][none_left], shares[:, 1:][none_left] = -1, 0.0
    ranked = torch.from_numpy(ranked)
    return DraftSample(ranked[:, 0], None, None, ranked[:, 1:], torch.from_numpy(shares), usable)


def greedy_in_torch(logits: Tensor, subset: TokenSubset | None, alternatives: int) -> DraftSample:
    """What `greedy_in_numpy` gives, for a GPU: without a host sync."""
    maxima = search_maxima(logits)
    row_max = maxima.amax(-1)
    if subset is None:
        ids = argmax(logits, row_max, maxima)
    else:
        lowest = torch.where(logits == row_max.unsqueeze(1), subset.ids, _NO_TOKEN).amin(-1)
        ids = torch.where(lowest == _NO_TOKEN, subset.ids[-1], lowest)
    if not alternatives:
        return DraftSample(ids, usable=row_max.isfinite())
    values, columns = likeliest(logits, alternatives + 1, maxima)
    e = (values - row_max.unsqueeze(1)).exp()
    probs = e / (logits - row_max.unsqueeze(1)).exp_().sum(-1, keepdim=True)
    ranked = columns if subset is None else subset.ids[columns]
    return DraftSample(ids, None, None, *_others(ids, probs[:, 0], ranked, probs, alternatives), row_max.isfinite())


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
    """What `coupled_ranking` gives, without its host syncs: each token is taken out for the next to be found."""
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


def truncated(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    n: int,
    maxima: Tensor | None = None,
    subset: TokenSubset | None = None,
    alternatives: int = 0,
) -> DraftSample:
    """A draw from the n likeliest tokens, renormalised. Shapes as in `sample_drafts`; temperature, threshold:
    float32 [M]; maxima: what `search_maxima` gives, if the caller has it."""
    values, q_ids = likeliest(logits, n, maxima)
    if subset is not None:
        q_ids = subset.ids[q_ids]
    choice = draft_choice
    if logits.device.type == "cuda":
        from outrider.actors.verification import triton_draws

        choice = triton_draws.draft_choice
    return choice(values, q_ids, temperature, threshold, seed, position, round_start, alternatives)


def draft_choice(
    values: Tensor,
    q_ids: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    round_start: Tensor,
    alternatives: int = 0,
) -> DraftSample:
    """A draw from q, the softmax of some logits. values: float32 [M, n], descending; q_ids: int64 [M, n], whose they
    are. Tokens below the threshold are listed at probability 0. `triton_draws.draft_choice` is the same for a GPU."""
    scaled = values / temperature.unsqueeze(1)
    if threshold is not None:
        scaled = torch.where(values >= threshold.unsqueeze(1), scaled, -torch.inf)
    q_probs = scaled.softmax(-1)
    cumulative = q_probs.to(torch.float64).cumsum(-1)
    target = uniform64(seed, Role.DRAFT, position, round_start) * cumulative[:, -1]
    index = (cumulative <= target.unsqueeze(1)).sum(-1)
    last = (q_probs > 0).sum(-1) - 1  # values are in descending order, so the zeros come last
    index = torch.minimum(index, last.clamp_min(0)).unsqueeze(1)
    ids = q_ids.gather(1, index).squeeze(1)
    others = confidence = None
    if alternatives:
        others, confidence = _others(ids, q_probs.gather(1, index).squeeze(1), q_ids, q_probs, alternatives)
    return DraftSample(ids, q_ids, q_probs, others, confidence, q_probs.sum(-1).isfinite())


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
