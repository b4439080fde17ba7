"""Verifies drafts in Triton, by two kernels and one pass over the logits, without waiting for the GPU.

`scan` runs one program for each row and tile of `TILE` tokens, and keeps what `torch_kernel.RowScan` holds, by tile.
`decide` runs one program for each request: it joins the tiles of the rows it reaches, accepts drafts, and draws the
last token. The rules and their papers are in `torch_kernel.py`. The order of operations is the same, and so is the
noise (`noise.py`), to the bit.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from outrider.actors.verification.batch import Status, VerificationBatch, VerificationResult
from outrider.actors.verification.constraints import thresholds
from outrider.actors.verification.noise import MAX_BELOW_ZERO, MAX_GUMBEL, Role
from outrider.actors.verification.search import TILE
from outrider.cluster.link.messages import Q_SUM_TOLERANCE
from outrider.cluster.modes import Mode

GREEDY, BLOCK, COUPLED = tl.constexpr(int(Mode.GREEDY)), tl.constexpr(int(Mode.BLOCK)), tl.constexpr(int(Mode.COUPLED))
ACCEPT, RESIDUAL = tl.constexpr(int(Role.ACCEPT)), tl.constexpr(int(Role.RESIDUAL))
TINY = tl.constexpr(2.0**-126)
"""The smallest normal float32; Triton makes a smaller literal float64."""

COUPLED_LEADING, COUPLED_FINE = tl.constexpr(int(Role.COUPLED)), tl.constexpr(int(Role.COUPLED_FINE))


@triton.jit
def philox_words(seed, block, position, role, round_start):
    """Returns the words of `noise.words`, four uint32 for each entry of `block` (uint32).

    ``tl.philox`` is Philox4x32-10 with the seed's low and high words as the key. seed: int64; position, role,
    round_start: integers.
    """
    zeros = tl.zeros_like(block)
    place, start = position.to(tl.uint32) + zeros, round_start.to(tl.uint32) + zeros
    return tl.philox(seed, block, place, zeros + role, start)


@triton.jit
def accept_noise(seed, position, round_start):
    """Returns the uniform by which a draft is accepted, a float32 scalar in (0, 1)."""
    block = tl.full([1], 0, tl.uint32)
    w0, _w1, _w2, _w3 = philox_words(seed, block, position, ACCEPT, round_start)
    return tl.max(((w0 >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07, axis=0)  # 2**-23


@triton.jit
def uniform64(seed, position, role, round_start):
    """Returns `noise.uniform64`, a float64 scalar in (0, 1)."""
    block = tl.full([1], 0, tl.uint32)
    w0, w1, _w2, _w3 = philox_words(seed, block, position, role, round_start)
    bits = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    return tl.max((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16, axis=0)  # 2**-52


@triton.jit
def leading_bytes(seed, position, start, TILE: tl.constexpr):
    """Returns the leading bytes of tokens start .. start + TILE, int32 [TILE]. start is a multiple of 16."""
    block = (start // 16 + tl.arange(0, TILE // 16)).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED_LEADING, tl.full([1], 0, tl.uint32))
    packed = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE // 4])
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    return tl.reshape((packed[:, None] >> shift[None, :]) & 0xFF, [TILE]).to(tl.int32)


@triton.jit
def leading_bytes_of(seed, position, token):
    """Returns the leading bytes of any N tokens, int32 [N]. It computes a Philox block for each token."""
    block = (token // 16).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED_LEADING, tl.full([1], 0, tl.uint32))
    lane = (token // 4) % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return ((word >> ((token % 4) * 8).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def gumbel(seed, position, token, leading):
    """Returns g of one token, a float32 scalar, given its leading byte (int32 scalar)."""
    block = (token // 4).to(tl.uint32) + tl.full([1], 0, tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED_FINE, tl.full([1], 0, tl.uint32))
    lane = token % 4
    fine = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    word = (leading.to(tl.int64) << 24) | (fine.to(tl.int64) >> 8)
    v = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return tl.max((-tl.log(-tl.log(1.0 - v))).to(tl.float32), axis=0)


@triton.jit
def join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t):
    """Joins a row's tiles to its largest logit, whether the row is bad, its total mass, and its chosen token.

    Mass or token are undefined in the modes that have none.
    """
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
    """Returns exp((logit - row_max) / T) of some tokens of a row, 0 below the threshold and outside the vocabulary."""
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
    """Draws a token from norm(max(0, scale p - q)) by u, as `torch_kernel.sample_residual` does.

    q has `count` entries from `first_q` on, or is one-hot at the draft without HAS_Q; count 0 subtracts nothing.
    """
    t, inside = tl.arange(0, TILES), tl.arange(0, TILE)
    maxima = tl.load(tile_max + row * tiles + t, mask=t < tiles, other=float("-inf"))
    mass = tl.load(tile_value + row * tiles + t, mask=t < tiles, other=0.0)
    mass = (mass * tl.exp(tl.div_rn(maxima - row_max, tl.load(temperature_R + row)))).to(tl.float64)
    left = mass * scale.to(tl.float64)
    # Loading each entry of q as a scalar is cheaper than finding it among the lanes, which costs barriers.
    j = tl.zeros_like(count)
    while j < count:
        place, q = _entry(draft, q_ids, q_probs, first_q + j, HAS_Q)
        e = weight(logits, vocab_size, row, place, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
        taken = tl.where(q > 0, tl.minimum(scale * e, q * total), 0.0).to(tl.float64)
        left = tl.where(t == place // TILE, left - taken, left)
        j += 1
    tile, u = invert(tl.maximum(left, 0.0), mass, u, t)

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
    place, u = invert(tl.maximum(left, 0.0), all_of_it, u, inside)
    return start + place


@triton.jit
def _entry(draft, q_ids, q_probs, index, HAS_Q: tl.constexpr):
    """Returns a token of q and its probability."""
    if HAS_Q:
        place = tl.load(q_ids + index)
        q = tl.load(q_probs + index)
    else:
        place = draft
        q = 1.0
    return place, q


@triton.jit
def invert(weights, otherwise, u, index):
    """Returns the index u falls on and how far into its share, as `_invert` in torch_kernel.py does.

    It uses the weights `otherwise` where no weight is left. index: 0, 1, 2 and so on.
    """
    weights = tl.where(tl.sum(weights, axis=0) > 0, weights, otherwise)
    cumulative = tl.cumsum(weights, axis=0)
    target = u * tl.max(cumulative, axis=0)
    chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, index, 0), axis=0))
    share = tl.sum(tl.where(index == chosen, weights, 0.0), axis=0)
    before = tl.sum(tl.where(index == chosen, cumulative, 0.0), axis=0) - share
    rest = tl.where(share > 0, (target - before) / tl.where(share > 0, share, 1.0), 0.0)
    return chosen, tl.minimum(tl.maximum(rest, 0.0), 1.0)


NO_SCORE = tl.constexpr(-float("inf"))
LARGEST, LEAST = tl.constexpr(MAX_GUMBEL), tl.constexpr(-MAX_BELOW_ZERO)


@triton.jit
def scan(
    logits, vocab_size, temperature_R, threshold_R, row_request, mode_B, seed_B, position_B, first_row_B,
    tile_max, tile_value, tile_token, tiles, token_ids=None,
    HAS_THRESHOLD: tl.constexpr = False, HAS_COUPLED: tl.constexpr = False, TILE: tl.constexpr = 1024,
    HAS_TOKEN_IDS: tl.constexpr = False,
):  # fmt: skip
    """Reads one tile of one row; one program for each.

    tile_max [R, tiles]: the largest logit, NaN if one is. tile_value, tile_token: by mode the argmax (token only), the
    mass in units of exp(tile_max / T) (value only), or the best score of the coupled choice and its token. Without
    HAS_COUPLED no row is COUPLED; that branch would take registers, and so occupancy, from all modes.
    With HAS_TOKEN_IDS the columns stand for token_ids, int64 [V], in any order; in COUPLED mode only.
    """
    # Neighbouring programs read neighbouring memory. Rows have 64 bits, because R x V may pass 2**31.
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
            # The leading byte alone bounds g; 1e-3 allows for rounding.
            upper = scaled + tl.where(leading == 0, LARGEST, _bound(tl.maximum(leading, 1)) + 1e-3)
            upper = tl.where(scaled > NO_SCORE, upper, NO_SCORE)
            lower = scaled + tl.where(leading == 255, LEAST, _bound(tl.minimum(leading, 254) + 1) - 1e-3)
            worth = tl.max(lower, axis=0)
            best = tl.max(tl.full([1], float("-inf"), tl.float32), axis=0)
            token = tl.max(tl.full([1], 0, tl.int32), axis=0)
            top = tl.max(upper, axis=0)
            # Exact scores are computed in the order of their bounds, until no other bound reaches the best one. Each
            # iteration removes one token, so the loop ends; NaN compares false.
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
    """Returns -log(-log(1 - leading / 256)), float32; leading: int32 in 1 .. 255."""
    return -tl.log(-tl.log(1.0 - leading.to(tl.float32) * 0.00390625))


BAD_PROPOSAL, BAD_LOGITS = tl.constexpr(int(Status.BAD_PROPOSAL)), tl.constexpr(int(Status.BAD_LOGITS))
TOLERANCE = tl.constexpr(Q_SUM_TOLERANCE)


# K changes from step to step, and Triton would compile a kernel each for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["K"])
def decide(
    logits, vocab_size, temperature_R, threshold_R, mode_B, seed_B, position_B, num_drafts_B, first_row_B,
    first_draft_B, draft_ids, q_ids, q_probs, n, tile_max, tile_value, tile_token, tiles,
    token_ids, status_B, K,
    HAS_THRESHOLD: tl.constexpr, HAS_Q: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Decides which tokens of one request are committed; one program for each."""
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

    # `reach` is p_i of the block rule; standard rejection has scale 1.
    accepted = tl.zeros_like(num_drafts)
    usable = num_drafts
    status = tl.zeros_like(num_drafts)
    reach = tl.max(tl.full([1], 1.0, tl.float32), axis=0)
    scale = reach
    i = tl.zeros_like(num_drafts)
    going = num_drafts >= 0
    while going & (i <= usable):
        row = first_row + i
        row_max, row_bad, total, choice = join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t)
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
            p = weight(logits, vocab_size, row, ids, row_max, temperature_R, threshold_R, HAS_THRESHOLD)
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
                    reach = tl.minimum(reach * p_draft / tl.maximum(q_draft, TINY), 1.0)
                else:
                    going = accept_noise(seed, position + i, position) * q_draft < p_draft
                    accepted = tl.where(going, i + 1, accepted)
        else:
            if i < usable:
                going = choice == draft
                accepted = tl.where(going, i + 1, accepted)
        i += 1
    # A bad draft is reported even where verification stopped before it, as in the torch kernel.
    while i < num_drafts:
        draft = tl.load(draft_ids + first_draft + i)
        ids, q, ok = _load_q(draft, first_draft + i, q_ids, q_probs, n, vocab_size, i < num_drafts, lane, HAS_Q)
        if ~(ok | (~sampled & (draft >= 0) & (draft < vocab_size))):
            status = status | BAD_PROPOSAL
        i += 1

    row = first_row + accepted
    row_max, row_bad, total, last = join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t)
    if row_bad:
        status = status | BAD_LOGITS
    elif sampled:
        u = uniform64(seed, position + accepted, RESIDUAL, position)
        subtract = accepted < usable
        draft = tl.max(tl.full([1], -1, tl.int64), axis=0)
        if subtract:
            draft = tl.load(draft_ids + first_draft + accepted)
        drawn = draw_residual(
            logits, vocab_size, row, row_max, total, tl.where(subtract, scale, 1.0), temperature_R, threshold_R,
            tile_max, tile_value, tiles, draft, q_ids, q_probs, (first_draft + accepted) * n,
            tl.where(subtract, n, 0), u, HAS_THRESHOLD, HAS_Q, TILE, TILES,
        )  # fmt: skip
        last = drawn.to(last.dtype)

    length = tl.where(row_bad, -1, accepted)
    j = tl.zeros_like(num_drafts)
    while j <= K:
        token = tl.where(j == length, last, -1).to(tl.int64)
        if j < length:
            token = tl.load(draft_ids + first_draft + j)
        tl.store(token_ids + request * (K + 1) + j, token.to(tl.int32))
        j += 1
    tl.store(status_B + request, status)


@triton.jit
def _load_q(
    draft, index, q_ids, q_probs, n, vocab_size, active, lane, HAS_Q: tl.constexpr
):  # fmt: skip
    """Loads a draft's q: ids int64 [N], probabilities float32 [N], and whether it is valid, as `batch.valid_q` says.

    All probabilities are 0 where not `active`.
    """
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


def verify(batch: VerificationBatch) -> VerificationResult:
    """Verifies one step, as `dispatch.Verification` says."""
    logits, device = batch.logits.contiguous(), batch.logits.device
    rows, vocab_size = logits.shape
    requests, K = len(batch.num_drafts), batch.max_drafts
    tiles = triton.cdiv(vocab_size, TILE)
    tile_max, tile_value = (torch.empty(rows, tiles, device=device) for _ in range(2))
    tile_token = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    threshold = thresholds(logits, logits.amax(-1), batch.constraints) if batch.constraints.any else None
    temperature = batch.constraints.temperature
    if rows:
        scan[(rows * tiles,)](
            logits, vocab_size, temperature, threshold, batch.row_request, batch.mode, batch.seed, batch.position,
            batch.first_row, tile_max, tile_value, tile_token, tiles, HAS_THRESHOLD=threshold is not None,
            HAS_COUPLED=any(group.mode is Mode.COUPLED for group in batch.groups), TILE=TILE,
        )  # fmt: skip
    result = VerificationResult(
        token_ids=torch.empty(requests, K + 1, dtype=torch.int32, device=device),
        status=torch.empty(requests, dtype=torch.int64, device=device),
    )
    if requests:
        n = 1 if batch.q_ids is None else batch.q_ids.shape[1]
        decide[(requests,)](
            logits, vocab_size, temperature, threshold, batch.mode, batch.seed, batch.position, batch.num_drafts,
            batch.first_row, batch.first_draft, batch.draft_ids, batch.q_ids, batch.q_probs, n, tile_max, tile_value,
            tile_token, tiles, result.token_ids, result.status, K,
            HAS_THRESHOLD=threshold is not None, HAS_Q=batch.q_ids is not None, TILE=TILE,
            TILES=triton.next_power_of_2(tiles), N=triton.next_power_of_2(n),
        )  # fmt: skip
    return result
