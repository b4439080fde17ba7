"""The decision in Triton, one program for each request: it joins the tiles of the rows it comes to, accepts, and draws
the last token. The rules and their papers are in `torch_kernel.py`; this is the same in the same order."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from actors.verification.batch import Q_SUM_TOLERANCE, Status
from actors.verification.mode import Mode
from actors.verification.triton_noise import accept_noise, residual_noise
from actors.verification.triton_row import draw_residual, join, weight

GREEDY, BLOCK, COUPLED = tl.constexpr(int(Mode.GREEDY)), tl.constexpr(int(Mode.BLOCK)), tl.constexpr(int(Mode.COUPLED))
BAD_PROPOSAL, BAD_LOGITS = tl.constexpr(int(Status.BAD_PROPOSAL)), tl.constexpr(int(Status.BAD_LOGITS))
TOLERANCE = tl.constexpr(Q_SUM_TOLERANCE)


# K differs from step to step: no kernel of its own for 1 or for multiples of 16.
@triton.jit(do_not_specialize=["K"])
def decide(
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
    row_max, row_bad, total, last = join(tile_max, tile_value, tile_token, row, tiles, mode, temperature_R, t)
    if row_bad:
        status = status | BAD_LOGITS
    elif sampled:
        u = residual_noise(seed, position + accepted, position)
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
    tl.store(accepted_len_B + request, tl.maximum(length, 0))
    tl.store(status_B + request, status)


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
