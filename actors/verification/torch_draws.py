"""Draws draft tokens in torch: greedy, and from the n likeliest tokens. `triton_draws.py` is the GPU's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.actors.verification.noise import Role, uniform64
from outrider.actors.verification.search import TokenSubset, argmax, search_maxima, top_n

_NO_TOKEN = 2**62


@dataclass(frozen=True, eq=False)
class DraftSample:
    """Holds the tokens drawn for M rows.

    ids: int64 [M]. q_ids: int64 [M, n] and q_probs: float32 [M, n], the distribution the ids were drawn from; None in
    GREEDY and COUPLED mode, where verification needs none.

    alternatives: int64 [M, A], other tokens that verification may choose, likeliest first, -1 where there is none.
    confidence: float32 [M, 1 + A], the drafter's probabilities of the token drawn and of these. None unless asked for.
    usable: bool [M], False where the logits are no distribution (NaN, infinity, nothing but minus infinity); the rest
    of such a row is undefined.
    """

    ids: Tensor
    q_ids: Tensor | None = None
    q_probs: Tensor | None = None
    alternatives: Tensor | None = None
    confidence: Tensor | None = None
    usable: Tensor | None = None


def greedy_choice(logits: Tensor, subset: TokenSubset | None = None, alternatives: int = 0) -> DraftSample:
    """Draws what `sample_drafts` draws in GREEDY mode, without waiting for a GPU. The lowest id wins among equals."""
    maxima = search_maxima(logits)
    row_max = maxima.amax(-1)
    if subset is None:
        ids = argmax(logits, row_max, maxima)
    else:
        lowest = torch.where(logits == row_max.unsqueeze(1), subset.ids, _NO_TOKEN).amin(-1)
        ids = torch.where(lowest == _NO_TOKEN, subset.ids[-1], lowest)
    if not alternatives:
        return DraftSample(ids, usable=row_max.isfinite())
    values, columns = top_n(logits, alternatives + 1, maxima)
    e = (values - row_max.unsqueeze(1)).exp()
    probs = e / (logits - row_max.unsqueeze(1)).exp_().sum(-1, keepdim=True)
    ranked = columns if subset is None else subset.ids[columns]
    return DraftSample(
        ids, None, None, *_alternatives(ids, probs[:, 0], ranked, probs, alternatives), row_max.isfinite()
    )


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
    """Draws from q, the softmax of the n likeliest tokens' logits. `triton_draws.draft_choice` does so on a GPU.

    values: float32 [M, n], descending; q_ids: int64 [M, n], their tokens. Tokens below the threshold are listed with
    probability 0.
    """
    scaled = values / temperature.unsqueeze(1)
    if threshold is not None:
        scaled = torch.where(values >= threshold.unsqueeze(1), scaled, -torch.inf)
    q_probs = scaled.softmax(-1)
    cumulative = q_probs.to(torch.float64).cumsum(-1)
    target = uniform64(seed, Role.DRAFT, position, round_start) * cumulative[:, -1]
    index = (cumulative <= target.unsqueeze(1)).sum(-1)
    last = (q_probs > 0).sum(-1) - 1  # values descend, so tokens of probability 0 come last
    index = torch.minimum(index, last.clamp_min(0)).unsqueeze(1)
    ids = q_ids.gather(1, index).squeeze(1)
    others = confidence = None
    if alternatives:
        others, confidence = _alternatives(ids, q_probs.gather(1, index).squeeze(1), q_ids, q_probs, alternatives)
    return DraftSample(ids, q_ids, q_probs, others, confidence, q_probs.sum(-1).isfinite())


def _alternatives(ids: Tensor, prob: Tensor, ranked: Tensor, probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns `alternatives` and `confidence` of DraftSample.

    ids, prob: [M], the token drawn and its probability. ranked, probs: [M, m], the likeliest tokens, the one drawn
    perhaps among them, and their probabilities.
    """
    short = count + 1 - ranked.shape[1]
    if short > 0:
        pad = (0, short)
        ranked = torch.nn.functional.pad(ranked, pad, value=-1)
        probs = torch.nn.functional.pad(probs, pad)
    is_after_drawn = (ranked[:, :count] == ids.unsqueeze(1)).cumsum(-1)
    place = torch.arange(count, device=ids.device) + is_after_drawn
    others, their_probs = ranked.gather(1, place), probs.gather(1, place)
    return torch.where(their_probs > 0, others, -1), torch.cat([prob.unsqueeze(1), their_probs], dim=1)
