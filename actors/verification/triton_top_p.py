"""Finds top_p's threshold of each row in Triton, without ordering the row and without waiting for the GPU."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from outrider.actors.verification.search import TILE


# The number of rows changes from step to step, and Triton would compile a kernel each for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def find_nucleus(
    logits, weights, rows, vocab_size, aim_R, found_R, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Finds the largest logit such that the tokens at or above it weigh `aim_R`, by a search over its bits.

    Flipping the bits of negative floats orders all floats as unsigned integers, so each pass settles two bits.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    aim = tl.load(aim_R + row, mask=row < rows, other=float("inf"))
    place = tl.arange(0, TILE)
    found = tl.zeros([ROWS], tl.uint32)
    step = tl.full([ROWS], 1 << 30, tl.uint32)
    for _ in range(16):
        one = tl.zeros([ROWS, TILE], tl.float64)
        two = tl.zeros([ROWS, TILE], tl.float64)
        three = tl.zeros([ROWS, TILE], tl.float64)
        for start in range(0, vocab_size, TILE):
            ids = row[:, None] * vocab_size + start + place[None, :]
            exists = (row[:, None] < rows) & (start + place[None, :] < vocab_size)
            bits = tl.load(logits + ids, mask=exists, other=0.0).to(tl.uint32, bitcast=True)
            w = tl.load(weights + ids, mask=exists, other=0.0).to(tl.float64)
            key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
            one += tl.where(key >= (found + step)[:, None], w, 0.0)
            two += tl.where(key >= (found + 2 * step)[:, None], w, 0.0)
            three += tl.where(key >= (found + 3 * step)[:, None], w, 0.0)
        reached = (tl.sum(one, axis=1) >= aim).to(tl.uint32)
        reached += (tl.sum(two, axis=1) >= aim).to(tl.uint32)
        reached += (tl.sum(three, axis=1) >= aim).to(tl.uint32)
        found += reached * step
        step = step // 4
    bits = tl.where(found >= 0x80000000, found & 0x7FFFFFFF, found ^ 0xFFFFFFFF)
    tl.store(found_R + row, bits.to(tl.float32, bitcast=True), mask=row < rows)


def nucleus(logits: Tensor, weights: Tensor, aim: Tensor, rows_at_once: int = 1) -> Tensor:
    """Returns the largest logit of each row such that the tokens at or above it weigh `aim` together.

    Args:
        logits: float32 [R, V].
        weights: float32 [R, V], monotonic in the logits.
        aim: float64 [R], above 0 and at most the row's total weight.
        rows_at_once: rows per program, a power of 2. More than one pays in Triton's interpreter only.

    Returns:
        float32 [R], undefined for rows that are not finite.
    """
    logits, weights, (rows, vocab_size) = logits.contiguous(), weights.contiguous(), logits.shape
    found = torch.empty(rows, device=logits.device)
    if rows:
        programs = triton.cdiv(rows, rows_at_once)
        find_nucleus[(programs,)](
            logits, weights, rows, vocab_size, aim, found, ROWS=rows_at_once,
            TILE=min(TILE, triton.next_power_of_2(vocab_size)),
        )  # fmt: skip
    return found
