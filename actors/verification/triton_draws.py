"""Draws draft tokens in Triton, coupled and from the n likeliest tokens, without waiting for the GPU.

The draws are those of `coupled.py` and `torch_draws.py`, with the same noise to the bit.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from outrider.actors.verification.noise import Role
from outrider.actors.verification.search import TILE
from outrider.actors.verification.torch_draws import DraftSample
from outrider.actors.verification.triton_kernel import invert, scan, uniform64
from outrider.cluster.modes import Mode

DRAFT = tl.constexpr(int(Role.DRAFT))


# The number of alternatives changes, and Triton would compile a kernel each for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["alternatives"])
def draw_from_q(
    values, q_ids, n, temperature_M, threshold_M, seed_M, position_M, round_start_M,
    id_M, q_probs, usable_M, others, confidence, alternatives,
    HAS_THRESHOLD: tl.constexpr, HAS_OTHERS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Draws one token of a row; one program for each row.

    N is at least n and 1 + alternatives. Lanes from n on have probability 0 and fill up the alternatives.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    inside = lane < n
    z = tl.load(values + row * n + lane, mask=inside, other=float("-inf"))
    ids = tl.load(q_ids + row * n + lane, mask=inside, other=-1)
    scaled = tl.div_rn(z, tl.load(temperature_M + row))
    if HAS_THRESHOLD:
        scaled = tl.where(z >= tl.load(threshold_M + row), scaled, float("-inf"))
    e = tl.exp(scaled - tl.max(scaled, axis=0))
    q = tl.div_rn(e, tl.sum(e, axis=0))
    u = uniform64(tl.load(seed_M + row), tl.load(position_M + row), DRAFT, tl.load(round_start_M + row))
    weights = q.to(tl.float64)
    chosen, _rest = invert(weights, weights, u, lane)
    own = lane == chosen
    tl.store(id_M + row, tl.sum(tl.where(own, ids, 0), axis=0))
    tl.store(q_probs + row * n + lane, q, mask=inside)
    tl.store(usable_M + row, (tl.sum(q, axis=0) < float("inf")).to(tl.uint8))  # NaN compares false
    if HAS_OTHERS:
        place = lane - (lane > chosen).to(tl.int32)
        asked = (place < alternatives) & (lane != chosen)
        tl.store(others + row * alternatives + place, tl.where(q > 0, ids, -1), mask=asked)
        share = tl.where(own, 0, 1 + place)
        tl.store(confidence + row * (1 + alternatives) + share, q, mask=asked | own)


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
    """Returns what `torch_draws.draft_choice` returns, in one launch. Shapes as there."""
    values, q_ids, (rows, n) = values.contiguous(), q_ids.contiguous(), values.shape
    ids, q_probs, usable = q_ids.new_empty(rows), torch.empty_like(values), values.new_empty(rows, dtype=torch.uint8)
    others = confidence = None
    if alternatives:
        others, confidence = q_ids.new_empty(rows, alternatives), values.new_empty(rows, 1 + alternatives)
    if rows:
        draw_from_q[(rows,)](
            values, q_ids, n, temperature, threshold, seed, position, round_start, ids, q_probs, usable, others,
            confidence, alternatives, HAS_THRESHOLD=threshold is not None, HAS_OTHERS=alternatives > 0,
            N=triton.next_power_of_2(max(n, 1 + alternatives)),
        )  # fmt: skip
    return DraftSample(ids, q_ids, q_probs, others, confidence, usable.view(torch.bool))


def coupled_choice(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    """Returns the first token of `coupled.coupled_ranking`, int64 [R], without waiting for the GPU.

    Shapes as there; token_ids: int64 [V], the tokens of its subset.
    """
    logits = logits.contiguous()
    rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, TILE)
    tile_max, tile_value = (torch.empty(rows, tiles, device=logits.device) for _ in range(2))
    tile_token = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    row = torch.arange(rows, device=logits.device)
    mode = torch.full((rows,), int(Mode.COUPLED), device=logits.device)
    if rows:
        scan[(rows * tiles,)](
            logits, vocab_size, temperature, threshold, row, mode, seed, position, row, tile_max, tile_value,
            tile_token, tiles, token_ids, HAS_THRESHOLD=threshold is not None, HAS_COUPLED=True, TILE=TILE,
            HAS_TOKEN_IDS=token_ids is not None,
        )  # fmt: skip
    best = tile_value.amax(-1, keepdim=True)
    last = vocab_size - 1 if token_ids is None else token_ids.amax().to(torch.int32)
    return torch.where(tile_value == best, tile_token, last).amin(-1).to(torch.int64)
