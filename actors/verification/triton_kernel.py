"""Verification in Triton: two kernels, one pass over the logits. `scan` leaves little of each tile of `TILE` tokens,
`decide` makes a request's tokens of it. Nothing here waits for the GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from actors.verification.batch import VerificationBatch, VerificationResult
from actors.verification.constraints import thresholds
from actors.verification.mode import Mode
from actors.verification.search import TILE
from actors.verification.triton_decide import decide
from actors.verification.triton_scan import scan


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
        scan[(rows * tiles,)](
            logits, vocab_size, temperature, threshold, batch.row_request, batch.mode, batch.seed, batch.position,
            batch.first_row, tile_max, tile_value, tile_token, tiles, HAS_THRESHOLD=threshold is not None,
            HAS_COUPLED=any(group.mode is Mode.COUPLED for group in batch.groups), TILE=TILE,
        )  # fmt: skip
    result = VerificationResult(
        token_ids=torch.empty(requests, K + 1, dtype=torch.int32, device=device),
        accepted_len=torch.empty(requests, dtype=torch.int64, device=device),
        status=torch.empty(requests, dtype=torch.int64, device=device),
    )
    if requests:
        n = 1 if batch.q_ids is None else batch.q_ids.shape[1]
        decide[(requests,)](
            logits, vocab_size, temperature, threshold, batch.mode, batch.seed, batch.position, batch.num_drafts,
            batch.first_row, batch.first_draft, batch.draft_ids, batch.q_ids, batch.q_probs, n, tile_max, tile_value,
            tile_token, tiles, result.token_ids, result.accepted_len, result.status, K,
            HAS_THRESHOLD=threshold is not None, HAS_Q=batch.q_ids is not None, TILE=TILE,
            TILES=triton.next_power_of_2(tiles), N=triton.next_power_of_2(n),
        )  # fmt: skip
    return result


def coupled_choice(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    seed: Tensor,
    position: Tensor,
    token_ids: Tensor | None = None,
) -> Tensor:
    """What `coupled.coupled_choice` gives, without its host syncs. Shapes as there; token_ids: int64 [V], of its
    subset. Returns int64 [R]."""
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
