"""Verification in Triton: two kernels, one pass over the logits.

`_scan` runs once for each row and tile and leaves what `row_scan.RowScan` holds, by tile. `_decide` runs once for
each request: it joins the tiles of the rows it comes to, accepts,
and draws the last token from one tile. The rules and their papers are in `torch_kernel.py`; this file does the same in
the same order.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from actors.verification.batch import Mode, Status, VerificationBatch, VerificationResult
from actors.verification.constraints import thresholds
from actors.verification.proposals import Q_SUM_TOLERANCE
from actors.verification.tiles import TILE
from actors.verification.triton_noise import accept_noise, gumbel, leading_bytes, residual_noise

GREEDY, BLOCK, COUPLED = tl.constexpr(int(Mode.GREEDY)), tl.constexpr(int(Mode.BLOCK)), tl.constexpr(int(Mode.COUPLED))
BAD_PROPOSAL, BAD_LOGITS = tl.constexpr(int(Status.BAD_PROPOSAL)), tl.constexpr(int(Status.BAD_LOGITS))
TOLERANCE = tl.constexpr(Q_SUM_TOLERANCE)
NO_SCORE = tl.constexpr(-float("inf"))


def verify(batch: VerificationBatch) -> VerificationResult:
    """See `interface.Verification`."""
    logits, device = batch.logits.contiguous(), batch.logits.device
    rows, vocab_size = logits.shape
    requests, K = len(batch.num_drafts), batch.max_drafts
    tiles = triton.cdiv(vocab_size, TILE)
    tile_max, tile_value = (torch.empty(rows, tiles, device=device) for _ in range(2))
    tile_token = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    # top_k and top_p need the order of the logits; the plain sampler pays for that too.
    threshold = thresholds(logits, logits.amax(-1), batch.constraints) if batch.constraints.any else None
    temperature = batch.constraints.temperature
    if rows:
        _scan[rows, tiles](
            logits, vocab_size, temperature, threshold, batch.row_request, batch.mode, batch.seed, batch.position,
            batch.first_row, tile_max, tile_value, tile_token, tiles, HAS_THRESHOLD=threshold is not None, TILE=TILE,
        )  # fmt: skip
    result = VerificationResult(
        token_ids=torch.empty(requests, K + 1, dtype=torch.int32, device=device),
        accepted_len=torch.empty(requests, dtype=torch.int64, device=device),
        status=torch.empty(requests, dtype=torch.int64, device=device),
    )
    if requests:
        n = 1 if batch.q_ids is None else batch.q_ids.shape[1]
        _decide[(requests,)](
            logits, vocab_size, temperature, threshold, batch.mode, batch.seed, batch.position, batch.num_drafts,
            batch.first_row, batch.first_draft, batch.draft_ids, batch.q_ids, batch.q_probs, n, tile_max, tile_value,
            tile_token, tiles, result.token_ids, result.accepted_len, result.status, K,
            HAS_THRESHOLD=threshold is not None, HAS_Q=batch.q_ids is not None, TILE=TILE,
            TILES=triton.next_power_of_2(tiles), N=triton.next_power_of_2(n),
        )  # fmt: skip
    return result


@triton.jit
def _scan(
    logits, vocab_size, temperature_R, threshold_R, row_request, mode_B, seed_B, position_B, first_row_B,
    tile_max, tile_value, tile_token, tiles,
    HAS_THRESHOLD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """tile_max [R, tiles]: the largest logit, NaN if one is. tile_value, tile_token: by mode the argmax (token only),
    the mass in units of exp(tile_max / T) (value only), or the best score of the coupled choice and its token."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(row_request + row)
    mode = tl.load(mode_B + request)
    start = tile * TILE
    ids = start + tl.arange(0, TILE)
    z = tl.load(logits + row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    largest = tl.max(z, axis=0)
    bad = tl.max((z != z).to(tl.int32), axis=0)
    out = row * tiles + tile
    tl.store(tile_max + out, tl.where(bad > 0, float("nan"), largest))
    if mode == GREEDY:
        tl.store(tile_token + out, tl.min(tl.where(z == largest, ids, start + TILE), axis=0))
    else:
        temperature = tl.load(temperature_R + row)
        if HAS_THRESHOLD:
            z = tl.where(z >= tl.load(threshold_R + row), z, float("-inf"))
        if mode == COUPLED:
            seed = tl.load(seed_B + request)
            position = tl.load(position_B + request) + row - tl.load(first_row_B + request)
            scaled = tl.div_rn(z, temperature)
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
                candidate = tl.min(tl.where(upper == top, ids, start + TILE), axis=0)
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


@triton.jit
def _decide(
    logits, vocab_size, temperature_R, threshold_R, mode_B, seed_B, position_B, num_drafts_B, first_row_B,
    first_draft_B, draft_ids, q_ids, q_probs, n, tile_max, tile_value, tile_token, tiles,
    token_ids, accepted_len_B, status_B, K,
    HAS_THRESHOLD: tl.constexpr, HAS_Q: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    mode = tl.load(mode_B + request)
    seed = tl.load(seed_B + request)
    position = tl.load(position_B + request)
    num_drafts = tl.load(num_drafts_B + request)
    first_row = tl.load(first_row_B + request)
    first_draft = tl.load(first_draft_B + request)
    sampled = (mode != GREEDY) & (mode != COUPLED)
    t = tl.arange(0, TILES)
    lane = tl.arange(0, N)

    # Rules in torch_kernel.py. reach is the block rule's p_i; standard rejection is scale 1.
    accepted = tl.zeros_like(num_drafts)
    usable = num_drafts
    status = tl.zeros_like(num_drafts)
    reach = tl.max(tl.full([1], 1.0, tl.float32), axis=0)
    scale = reach
    i = tl.zeros_like(num_drafts)
    going = num_drafts >= 0
    while going & (i <= usable):
        row = first_row + i
        row_max, row_bad, total, choice = _join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t)
        if row_bad:
            usable = i
        draft = tl.max(tl.full([1], -1, tl.int64), axis=0)
        if i < num_drafts:
            draft = tl.load(draft_ids + first_draft + i)
        ids, q, ok = _load_q(draft, first_draft + i, q_ids, q_probs, n, vocab_size, i < num_drafts, lane, HAS_Q)
        ok = ok | (~sampled & (draft >= 0) & (draft < vocab_size))
        if (i < num_drafts) & ~ok:
            usable = tl.minimum(usable, i)
            status = status | BAD_PROPOSAL
        if sampled:
            p = _weight(logits, vocab_size, row, ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
            p = tl.where(q > 0, p / total, 0.0)
            if (mode == BLOCK) & (i > 0):
                surplus = tl.maximum(reach - tl.sum(tl.minimum(reach * p, q), axis=0), 0.0)
                bottom = surplus + 1.0 - reach
                h = tl.where(bottom > 0, surplus / bottom, 1.0)
                h = tl.where(i >= usable, reach, h)
                if accept_noise(seed, position + i - 1, position) < h:
                    accepted = i
                    scale = reach
            if i < usable:
                own = ids == draft
                p_draft = tl.sum(tl.where(own, p, 0.0), axis=0)
                q_draft = tl.sum(tl.where(own, q, 0.0), axis=0)
                if mode == BLOCK:
                    reach = tl.minimum(reach * p_draft / tl.maximum(q_draft, 1e-38), 1.0)
                else:
                    going = accept_noise(seed, position + i, position) * q_draft < p_draft
                    accepted = tl.where(going, i + 1, accepted)
        else:
            if i < usable:
                going = choice == draft
                accepted = tl.where(going, i + 1, accepted)
        i += 1
    # A bad draft is reported even if verification never came to it, as in the torch kernel.
    while i < num_drafts:
        draft = tl.load(draft_ids + first_draft + i)
        ids, q, ok = _load_q(draft, first_draft + i, q_ids, q_probs, n, vocab_size, i < num_drafts, lane, HAS_Q)
        if ~(ok | (~sampled & (draft >= 0) & (draft < vocab_size))):
            status = status | BAD_PROPOSAL
        i += 1

    row = first_row + accepted
    row_max, row_bad, total, last = _join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t)
    if row_bad:
        status = status | BAD_LOGITS
    elif sampled:
        u = residual_noise(seed, position + accepted, position)
        subtract = accepted < usable
        draft = tl.max(tl.full([1], -1, tl.int64), axis=0)
        if subtract:
            draft = tl.load(draft_ids + first_draft + accepted)
        ids, q, ok = _load_q(draft, first_draft + accepted, q_ids, q_probs, n, vocab_size, subtract, lane, HAS_Q)
        scale = tl.where(subtract, scale, 1.0)
        e = _weight(logits, vocab_size, row, ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
        taken = tl.where(q > 0, tl.minimum(scale * e, q * total), 0.0).to(tl.float64)
        maxima = tl.load(tile_max + row * tiles + t, mask=t < tiles, other=float("-inf"))
        mass = tl.load(tile_value + row * tiles + t, mask=t < tiles, other=0.0)
        temperature = tl.load(temperature_R + row)
        mass = (mass * tl.exp(tl.div_rn(maxima - row_max, temperature))).to(tl.float64)
        tile, u = _draw(_less(mass, scale, ids // TILE, taken, t, lane, n), mass, u, t)
        inside_ids = tile * TILE + tl.arange(0, TILE)
        inside = _weight(logits, vocab_size, row, inside_ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
        inside = inside.to(tl.float64)
        place, u = _draw(_less(inside, scale, ids, taken, inside_ids, lane, n), inside, u, tl.arange(0, TILE))
        last = (tile * TILE + place).to(last.dtype)

    length = tl.where(row_bad, -1, accepted)
    j = tl.zeros_like(num_drafts)
    while j <= K:
        token = tl.where(j == length, last, -1).to(tl.int64)
        if j < length:
            token = tl.load(draft_ids + first_draft + j)
        tl.store(token_ids + request * (K + 1) + j, token.to(tl.int32))
        j += 1
    tl.store(accepted_len_B + request, tl.maximum(length, 0))
    tl.store(status_B + request, status)


@triton.jit
def _join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t):
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
def _weight(logits, vocab_size, row, ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD: tl.constexpr):
    """exp((logit - row_max) / T) of some tokens of a row, 0 below the threshold and outside the vocabulary."""
    exists = (ids >= 0) & (ids < vocab_size)
    z = tl.load(logits + row * vocab_size + ids, mask=exists, other=float("-inf"))
    if HAS_THRESHOLD:
        exists = exists & (z >= tl.load(threshold_R + row))
    return tl.where(exists, tl.exp(tl.div_rn(z - row_max, tl.load(temperature_R + row))), 0.0)


@triton.jit
def _load_q(
    draft, index, q_ids, q_probs, n, vocab_size, active, lane, HAS_Q: tl.constexpr
):  # fmt: skip
    """A draft's q: ids int64 [N], probabilities float32 [N], and whether it can be believed, see proposals.py. All q is
    0 where not `active`."""
    if HAS_Q:
        count = tl.where(active, n, 0)
        inside = lane < count
        ids = tl.load(q_ids + index * n + lane, mask=inside, other=-1)
        q = tl.load(q_probs + index * n + lane, mask=inside, other=0.0)
        fine = ~inside | ((ids >= 0) & (ids < vocab_size) & (q >= 0))
        ok = tl.min(fine.to(tl.int32), axis=0) > 0
        same = (ids[:, None] == ids[None, :]) & inside[:, None] & inside[None, :]
        ok = ok & (tl.sum(tl.sum(same.to(tl.int32), axis=1), axis=0) == count)
        ok = ok & (tl.abs(tl.sum(q, axis=0) - 1.0) <= TOLERANCE)
        ok = ok & (tl.max(((ids == draft) & (q > 0)).to(tl.int32), axis=0) > 0)
    else:
        ids = tl.where(lane < 1, draft, -1)
        q = tl.where(lane < tl.where(active, 1, 0), 1.0, 0.0)
        ok = (draft >= 0) & (draft < vocab_size)
    return ids, q, ok


@triton.jit
def _less(weights, scale, places, taken, index, lane, n):
    """scale * weights, less what q takes at its places, not below 0. weights: float64 at `index`; places, taken: [N]"""
    weights = weights * scale.to(tl.float64)
    for j in range(n):
        place = tl.sum(tl.where(lane == j, places, 0), axis=0)
        amount = tl.sum(tl.where(lane == j, taken, 0.0), axis=0)
        weights = tl.where(index == place, weights - amount, weights)
    return tl.maximum(weights, 0.0)


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
