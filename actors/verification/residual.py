"""The last token of a rejection round: a draw from norm(max(0, s p - q)), or from p where nothing is subtracted.

By inverting the distribution function with one uniform: first over tiles, whose masses the row scan left, then inside
one tile. Nothing else of the row is read. Sums are float64 here, so that a tail of tiny probabilities keeps its share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.verification.tiles import tile_size


def sample_residual(
    logits: Tensor,
    row: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    tile_mass: Tensor,
    scale: Tensor,
    q_ids: Tensor,
    q_weights: Tensor,
    u: Tensor,
) -> Tensor:
    """One token for each request.

    logits: float32 [R, V]. row: int64 [B], the row to draw from; the others are already those of that row:
    row_max, temperature, threshold: float32 [B]; tile_mass: float32 [B, tiles], in units of exp((logit - row_max) / T).
    scale: float32 [B], s. q_ids: int64 [B, n], q_weights: float32 [B, n], q in the unit of tile_mass, 0 where nothing
    is subtracted. u: float64 [B] in (0, 1). Returns int64 [B].

    If rounding leaves no residual at all (then p = q, and a rejection has probability 0), the draw is from p.
    """
    vocab_size = logits.shape[1]
    tile = tile_size(vocab_size)

    def weight(ids: Tensor) -> Tensor:
        values = logits[row.unsqueeze(1), ids]
        e = ((values - row_max.unsqueeze(1)) / temperature.unsqueeze(1)).exp()
        return e if threshold is None else torch.where(values >= threshold.unsqueeze(1), e, 0.0)

    # What q takes from each token of its support: min(s p, q).
    scale = scale.unsqueeze(1)
    taken = torch.minimum(scale * weight(q_ids), q_weights).to(torch.float64)
    mass = tile_mass.to(torch.float64)
    residual = (scale * mass).scatter_add(1, q_ids // tile, -taken).clamp_min(0)
    nothing = residual.sum(-1, keepdim=True) <= 0
    chosen = _invert(torch.where(nothing, mass, residual), u)
    tile_of, u_inside = chosen

    start = (tile_of * tile).unsqueeze(1)
    ids = start + torch.arange(tile, device=logits.device)
    inside = torch.where(ids < vocab_size, weight(ids.clamp_max(vocab_size - 1)), 0.0).to(torch.float64)
    offset = q_ids - start
    here = (offset >= 0) & (offset < tile)
    left = (scale * inside).scatter_add(1, offset.clamp(0, tile - 1), -torch.where(here, taken, 0.0)).clamp_min(0)
    nothing = nothing | (left.sum(-1, keepdim=True) <= 0)
    place, _ = _invert(torch.where(nothing, inside, left), u_inside)
    return tile_of * tile + place


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The index that u [B] falls on when each has a share of (0, 1) as large as its weight [B, m], and how far into its
    share it falls, again in [0, 1]. An index of weight 0 is never chosen unless all are 0."""
    cumulative = weights.cumsum(-1)
    target = u * cumulative[:, -1]
    index = (cumulative <= target.unsqueeze(1)).sum(-1, keepdim=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    index = torch.minimum(index, last)
    share = weights.gather(1, index).squeeze(1)
    before = cumulative.gather(1, index).squeeze(1) - share
    rest = torch.where(share > 0, (target - before) / share, 0.0)
    return index.squeeze(1), rest.clamp(0, 1)
