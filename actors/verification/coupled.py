"""Finds the token that coupled noise chooses, on a CPU, without the noise of every token.

The choice is argmax_x(log p(x) + g(x)); noise.py defines g and names the paper. The leading bits of the noise, cheap
for all tokens, rule out all but a few, and the remaining bits are generated for those alone. `triton_draws.py` and
`triton_kernel.py` make the same choice on GPUs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.verification.noise import (
    LOWER,
    MAX_BELOW_ZERO,
    MAX_GUMBEL_ORDINARY,
    TOKENS_PER_BLOCK,
    UPPER,
    gumbel,
    leading_bytes,
)
from outrider.actors.verification.search import CHUNK_ELEMENTS, TokenSubset, at_least, search_maxima

FEW_TOKENS = 256
"""Up to so many tokens in a row, the exact noise of all of them is cheaper than ruling any out."""


def coupled_ranking(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    row_max: Tensor,
    seed: Tensor,
    position: Tensor,
    count: int = 1,
    few_tokens: bool = False,
    maxima: Tensor | None = None,
    subset: TokenSubset | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the `count` tokens with the highest logits(x) / temperature + g(x), and their logits.

    The ids are int64 [R, count], the logits float32 [R, count]; the first token is the one chosen. Only tokens at or
    above the threshold count. Among equals the lowest id is first. Where no token is left, an id is -1 (except in the
    first column) and its logit minus infinity. A row does not depend on the other rows. Tensors of a device without a
    kernel of its own are copied to the CPU and back.

    Args:
        logits: float32 [R, V].
        temperature, threshold: float32 [R]; the temperature is above 0, the threshold in units of logits.
        row_max: float32 [R], the largest logit. Where it is not finite, the choice is valid but meaningless.
        seed, position: int64 [R].
        few_tokens: the caller knows that few tokens of a row are at or above the threshold.
        maxima: the result of `search_maxima`, if the caller has it.
        subset: the tokens of the columns, if not all.
    """
    (rows, vocab_size), device = logits.shape, logits.device
    if device.type != "cpu":
        logits, temperature, row_max, seed, position = (
            part.cpu() for part in (logits, temperature, row_max, seed, position)
        )
        subset = None if subset is None else TokenSubset(subset.ids.cpu())
    floor = torch.full_like(row_max, -math.inf) if threshold is None else threshold.cpu()
    maxima = search_maxima(logits) if maxima is None else maxima.cpu()
    every = few_tokens or vocab_size <= FEW_TOKENS or maxima.shape[1] < count
    step = max(rows, 1)
    if not every:
        step = max(1, CHUNK_ELEMENTS // (vocab_size if subset is None else len(subset.blocks) * TOKENS_PER_BLOCK))
    tokens, values = np.full((rows, count), -1), np.full((rows, count), -np.inf, np.float32)
    tokens[:, 0] = vocab_size - 1 if subset is None else int(subset.ids[-1])
    for start in range(0, rows, step):
        part = slice(start, start + step)
        z, t, noise = logits[part], temperature[part], (seed[part], position[part])
        if every:
            row, column = (found.numpy() for found in at_least(z, maxima[part], floor[part]))
            byte = None
        else:
            row, column, byte = _within_reach(z, t, floor[part], row_max[part], maxima[part], *noise, subset, count)
        _rank(z.numpy(), t.numpy(), row, column, byte, *noise, subset, tokens[part], values[part])
    return torch.from_numpy(tokens).to(device), torch.from_numpy(values).to(device)


def _within_reach(
    logits: Tensor,
    temperature: Tensor,
    floor: Tensor,
    row_max: Tensor,
    maxima: Tensor,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Returns rows, columns and leading bytes, [N] each, of all tokens that may be among their row's first `count`.

    It uses numpy, since the arrays are small and numpy's calls cost less than torch's.
    """
    vocab_size = logits.shape[1]
    leading = leading_bytes(seed, position, vocab_size, None if subset is None else subset.blocks).numpy()
    z, t, least = logits.numpy(), temperature.numpy(), floor.numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are not finite
        zero_row, zero_place = np.divmod(np.flatnonzero(leading == 0), leading.shape[1])
        zero_column = zero_place if subset is None else subset.column.numpy()[zero_place]
        exists = (zero_column >= 0) & (zero_column < vocab_size)
        zero_row, zero_column = zero_row[exists], zero_column[exists]
        value = z[zero_row, zero_column]
        allowed = value >= least[zero_row]
        zero_row, zero_column, value = zero_row[allowed], zero_column[allowed], value[allowed]

        # Each tile has one token at its maximum, so the count-th maximum is reached by `count` tokens.
        likely = row_max if count == 1 else maxima.topk(count, sorted=True).values[:, -1]
        best = likely.numpy() / t - np.float32(MAX_BELOW_ZERO)
        slack = np.abs(row_max.numpy()) * np.float32(1e-6) + np.float32(1e-6)  # for rounding
        _raise_to_nth(best, zero_row, value / t[zero_row] + LOWER[0], count)
        bound = np.maximum(least, (best - np.float32(MAX_GUMBEL_ORDINARY)) * t - slack)
        row_2, column_2 = (part.numpy() for part in at_least(logits, maxima, torch.from_numpy(bound)))
        byte_2 = leading[row_2, column_2 if subset is None else subset.place.numpy()[column_2]]
        ordinary = byte_2 > 0
        row = np.concatenate([zero_row, row_2[ordinary]])
        column = np.concatenate([zero_column, column_2[ordinary]])
        byte = np.concatenate([np.zeros(len(zero_row), np.uint8), byte_2[ordinary]])
        scaled = z[row, column] / t[row]
        _raise_to_nth(best, row, scaled + LOWER[byte], count)
        kept = scaled + UPPER[byte] >= (best - slack / t)[row]
    return row[kept], column[kept], byte[kept]


def _rank(
    z: NDArray[np.float32],
    t: NDArray[np.float32],
    row: NDArray[np.int64],
    column: NDArray[np.int64],
    byte: NDArray[np.uint8] | None,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    tokens: NDArray[np.int64],
    values: NDArray[np.float32],
) -> None:
    """Fills tokens and values, [R, count], with the best of each row by exact score.

    row, column: [N], no pair twice; byte: their leading bytes, if known.
    """
    token = column if subset is None else subset.ids.numpy()[column]
    where = torch.from_numpy(row)
    leading = None if byte is None else torch.from_numpy(byte.astype(np.int64))
    noise = gumbel(seed[where], position[where], torch.from_numpy(token), leading)
    value = z[row, column]
    with np.errstate(invalid="ignore", over="ignore"):
        score = value / t[row] + noise.numpy()
    order = np.lexsort((token, -score, row))
    row = row[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    listed = (rank < tokens.shape[1]) & ((rank == 0) | (value[order] > -np.inf))
    row, rank, order = row[listed], rank[listed], order[listed]
    tokens[row, rank], values[row, rank] = token[order], value[order]


def _raise_to_nth(best: NDArray[np.float32], row: NDArray[np.int64], score: NDArray[np.float32], n: int) -> None:
    """Raises best, [rows], in place to the row's n-th largest score, if it has that many. row, score: [N]."""
    if n == 1:
        np.maximum.at(best, row, score)
        return
    order = np.lexsort((-score, row))
    row, score = row[order], score[order]
    nth = np.arange(len(row)) - np.searchsorted(row, row) == n - 1
    best[row[nth]] = np.maximum(best[row[nth]], score[nth])
