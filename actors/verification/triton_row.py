"""One row of logits in Triton: the row from its tiles, weights of its tokens, and the draw of the last token."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from actors.verification.mode import Mode

GREEDY = tl.constexpr(int(Mode.GREEDY))


@triton.jit
def join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t):
    """A row from its tiles: largest logit, whether the row is bad, total mass, and the token that was chosen. Mass or
    token are meaningless in the modes that have none."""
    inside = t < tiles
    maxima = tl.load(tile_max + row * tiles + t, mask=inside, other=float("-inf"))
    row_max = tl.max(maxima, axis=0)
    bad = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
    bad = bad | (row_max == float("inf")) | (row_max == float("-inf"))
    value = maxima
    if mode != GREEDY:
        value = tl.load(tile_value + row * tiles + t, mask=inside, other=float("-inf"))
    tokens = tl.load(tile_token + row * tiles + t, mask=inside, other=0)
    token = tl.min(tl.where((value == tl.max(value, axis=0)) & inside, tokens, 2147483647), axis=0)
    mass = tl.where(inside, value * tl.exp(tl.div_rn(maxima - row_max, tl.load(temperature_R + row))), 0.0)
    return row_max, bad, tl.sum(mass, axis=0), token.to(tl.int64)


@triton.jit
def weight(logits, vocab_size, row, ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD: tl.constexpr):
    """exp((logit - row_max) / T) of tokens of a row, one or many, 0 below the threshold and outside the vocabulary."""
    exists = (ids >= 0) & (ids < vocab_size)
    z = tl.load(logits + row * vocab_size + ids, mask=exists, other=float("-inf"))
    if HAS_THRESHOLD:
        exists = exists & (z >= tl.load(threshold_R + row))
    return tl.where(exists, tl.exp(tl.div_rn(z - row_max, tl.load(temperature_R + row))), 0.0)


@triton.jit
def draw_residual(
    logits, vocab_size, row, row_max, total, scale, temperature_R, threshold_R, tile_max, tile_value, tiles,
    draft, q_ids, q_probs, first_q, count, u,
    HAS_THRESHOLD: tl.constexpr, HAS_Q: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A token drawn from norm(max(0, scale p - q)) by u, as `sample_residual` in residual.py. q: `count` entries from
    `first_q` on, or with certainty the draft when there is no q; count 0 subtracts nothing."""
    t, inside = tl.arange(0, TILES), tl.arange(0, TILE)
    maxima = tl.load(tile_max + row * tiles + t, mask=t < tiles, other=float("-inf"))
    mass = tl.load(tile_value + row * tiles + t, mask=t < tiles, other=0.0)
    mass = (mass * tl.exp(tl.div_rn(maxima - row_max, tl.load(temperature_R + row)))).to(tl.float64)
    left = mass * scale.to(tl.float64)
    # One entry of q at a time, loaded as a scalar: cheaper than to find it among the lanes, which costs barriers.
    j = tl.zeros_like(count)
    while j < count:
        place, q = _entry(draft, q_ids, q_probs, first_q + j, HAS_Q)
        e = weight(logits, vocab_size, row, place, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
        taken = tl.where(q > 0, tl.minimum(scale * e, q * total), 0.0).to(tl.float64)
        left = tl.where(t == place // TILE, left - taken, left)
        j += 1
    tile, u = _draw(tl.maximum(left, 0.0), mass, u, t)

    start = tile * TILE
    all_of_it = weight(logits, vocab_size, row, start + inside, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
    all_of_it = all_of_it.to(tl.float64)
    left = all_of_it * scale.to(tl.float64)
    j = tl.zeros_like(count)
    while j < count:
        place, q = _entry(draft, q_ids, q_probs, first_q + j, HAS_Q)
        if place // TILE == tile:
            e = weight(logits, vocab_size, row, place, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
            taken = tl.where(q > 0, tl.minimum(scale * e, q * total), 0.0).to(tl.float64)
            left = tl.where(inside == place - start, left - taken, left)
        j += 1
    place, u = _draw(tl.maximum(left, 0.0), all_of_it, u, inside)
    return start + place


@triton.jit
def _entry(draft, q_ids, q_probs, index, HAS_Q: tl.constexpr):
    if HAS_Q:
        place = tl.load(q_ids + index)
        q = tl.load(q_probs + index)
    else:
        place = draft
        q = 1.0
    return place, q


@triton.jit
def _draw(weights, otherwise, u, index):
    """Inversion, as `_invert` in residual.py: the index u falls on, and how far into its share. From `otherwise` where
    no weight is left. index: 0, 1, 2 and so on."""
    weights = tl.where(tl.sum(weights, axis=0) > 0, weights, otherwise)
    cumulative = tl.cumsum(weights, axis=0)
    target = u * tl.max(cumulative, axis=0)
    chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, index, 0), axis=0))
    share = tl.sum(tl.where(index == chosen, weights, 0.0), axis=0)
    before = tl.sum(tl.where(index == chosen, cumulative, 0.0), axis=0) - share
    rest = tl.where(share > 0, (target - before) / tl.where(share > 0, share, 1.0), 0.0)
    return chosen, tl.minimum(tl.maximum(rest, 0.0), 1.0)
