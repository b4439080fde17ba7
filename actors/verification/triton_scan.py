"""The pass over the logits in Triton, one program for each row and tile: what `row_scan.RowScan` holds, by tile."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from actors.verification.mode import Mode
from actors.verification.triton_noise import gumbel, leading_bytes, leading_bytes_of

GREEDY, COUPLED = tl.constexpr(int(Mode.GREEDY)), tl.constexpr(int(Mode.COUPLED))
NO_SCORE = tl.constexpr(-float("inf"))


@triton.jit
def scan(
    logits, vocab_size, temperature_R, threshold_R, row_request, mode_B, seed_B, position_B, first_row_B,
    tile_max, tile_value, tile_token, tiles, token_ids=None,
    HAS_THRESHOLD: tl.constexpr = False, HAS_COUPLED: tl.constexpr = False, TILE: tl.constexpr = 1024,
    HAS_TOKEN_IDS: tl.constexpr = False,
):  # fmt: skip
    """tile_max [R, tiles]: the largest logit, NaN if one is. tile_value, tile_token: by mode the argmax (token only),
    the mass in units of exp(tile_max / T) (value only), or the best score of the coupled choice and its token. Without
    HAS_COUPLED no row is COUPLED: its branch takes registers, and so occupancy, from all modes.
    With HAS_TOKEN_IDS the columns stand for token_ids, int64 [V], in any order; in COUPLED mode only."""
    # Neighbours read neighbouring memory. 64 bits, because R x V may pass 2**31.
    program = tl.program_id(0)
    row, tile = (program // tiles).to(tl.int64), program % tiles
    start = tile * TILE
    ids = start + tl.arange(0, TILE)
    z = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    request = tl.load(row_request + row)
    mode = tl.load(mode_B + request)
    largest = tl.max(z, axis=0)
    bad = tl.max((z != z).to(tl.int32), axis=0)
    out = program.to(tl.int64)
    tl.store(tile_max + out, tl.where(bad > 0, float("nan"), largest))
    if mode == GREEDY:
        tl.store(tile_token + out, tl.min(tl.where(z == largest, ids, start + TILE), axis=0))
    else:
        temperature = tl.load(temperature_R + row)
        if HAS_THRESHOLD:
            z = tl.where(z >= tl.load(threshold_R + row), z, float("-inf"))
        if HAS_COUPLED and mode == COUPLED:
            seed = tl.load(seed_B + request)
            position = tl.load(position_B + request) + row - tl.load(first_row_B + request)
            scaled = tl.div_rn(z, temperature)
            if HAS_TOKEN_IDS:
                ids = tl.load(token_ids + ids, mask=ids < vocab_size, other=2147483647).to(tl.int32)
                leading = leading_bytes_of(seed, position, ids)
            else:
                leading = leading_bytes(seed, position, start, TILE)
            # Bounds of g from the leading byte alone, 1e-3 for rounding: v is between leading / 256 and one more.
            upper = scaled + tl.where(leading == 0, 22.88, _bound(tl.maximum(leading, 1)) + 1e-3)
            upper = tl.where(scaled > NO_SCORE, upper, NO_SCORE)
            lower = scaled + tl.where(leading == 255, -3.14, _bound(tl.minimum(leading, 254) + 1) - 1e-3)
            worth = tl.max(lower, axis=0)
            best = tl.max(tl.full([1], float("-inf"), tl.float32), axis=0)
            token = tl.max(tl.full([1], 0, tl.int32), axis=0)
            top = tl.max(upper, axis=0)
            # Exact scores, most promising first, until no other bound reaches the best. Each turn takes one token out,
            # so this ends; NaN compares false.
            while (top > NO_SCORE) & (top >= worth) & (top >= best):
                candidate = tl.min(tl.where(upper == top, ids, 2147483647), axis=0)
                here = ids == candidate
                byte = tl.max(tl.where(here, leading, 0), axis=0)
                score = tl.max(tl.where(here, scaled, float("-inf")), axis=0) + gumbel(seed, position, candidate, byte)
                better = (score > best) | ((score == best) & (candidate < token))
                best = tl.where(better, score, best)
                token = tl.where(better, candidate, token)
                upper = tl.where(here, float("-inf"), upper)
                top = tl.max(upper, axis=0)
            tl.store(tile_value + out, best)
            tl.store(tile_token + out, token)
        else:
            mass = tl.sum(tl.exp(tl.div_rn(z - largest, temperature)), axis=0)
            tl.store(tile_value + out, tl.where(largest > NO_SCORE, mass, 0.0))


@triton.jit
def _bound(leading):
    """-log(-log(1 - leading / 256)), float32; leading: int32 in 1 .. 255."""
    return -tl.log(-tl.log(1.0 - leading.to(tl.float32) * 0.00390625))
