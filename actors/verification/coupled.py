"""The token that coupled noise chooses, found without the noise of every token.

argmax_x(log p(x) + g(x)): see gumbel.py for g and where the rule comes from. The leading bits of the noise, cheap for
all tokens, rule out all but a few; the rest of the noise is made for those alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from actors.verification.gumbel import (
    LOWER,
    MAX_BELOW_ZERO,
    MAX_GUMBEL,
    MAX_GUMBEL_ORDINARY,
    UPPER,
    gumbel,
    leading_bytes,
    leading_zeros,
)
from actors.verification.tiles import at_least, search_maxima
from actors.verification.token_subset import TOKENS_PER_BLOCK, TokenSubset

CHUNK_ELEMENTS = 1 << 19  # so that a chunk's intermediate values stay in cache
FEW_TOKENS = 256

_NO_TOKEN = 2**62


def coupled_choice(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    row_max: Tensor,
    seed: Tensor,
    position: Tensor,
    few_tokens: bool = False,
    maxima: Tensor | None = None,
    subset: TokenSubset | None = None,
) -> Tensor:
    """argmax_x(logits(x) / temperature + g(x)) over the tokens at or above the threshold; the lowest id among equals.

    logits: float32 [R, V]. temperature (above 0), threshold, row_max: float32 [R]; threshold is in units of logits.
    row_max: the largest logit; a row where it is not finite gets a defined, meaningless choice.
    seed, position: int64 [R]. few_tokens: the caller knows that few tokens of a row are at or above the threshold.
    maxima: what `search_maxima` gives, if the caller has it. subset: the tokens of the columns, if not all. Returns
    int64 [R], token ids. A row's choice does not depend on the other rows.

    Finds candidates with `nonzero`: no cost on the CPU, a host sync on a GPU, where the Triton kernel is used.
    """
    more = (row_max, seed, position, 1, few_tokens, maxima, subset)
    return coupled_ranking(logits, temperature, threshold, *more)[0].squeeze(1)


def coupled_ranking(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    row_max: Tensor,
    seed: Tensor,
    position: Tensor,
    count: int,
    few_tokens: bool = False,
    maxima: Tensor | None = None,
    subset: TokenSubset | None = None,
) -> tuple[Tensor, Tensor]:
    """What `coupled_choice` chooses, then what it would choose without that, and so on: token ids, int64 [R, count],
    and their logits, float32 [R, count]. Where no token is left -1, but in the first column, and minus infinity."""
    rows, vocab_size = logits.shape
    if rows == 0:
        return torch.empty(0, count, dtype=torch.int64, device=logits.device), logits.new_empty(0, count)
    floor = torch.full_like(row_max, -math.inf) if threshold is None else threshold
    if maxima is None:
        maxima = search_maxima(logits)
    if few_tokens or vocab_size <= FEW_TOKENS or maxima.shape[1] < count:
        row, column = at_least(logits, maxima, floor)
        token = column if subset is None else subset.ids[column]
        value = logits[row, column]
        score = value / temperature[row] + gumbel(seed[row], position[row], token)
        return _ranking(row, token, score, value, rows, count, _last(vocab_size, subset))

    # The likeliest tokens give a first bound, the tokens with the largest noise a better one; what is left must come
    # within MAX_GUMBEL_ORDINARY of it.
    blocks = None if subset is None else subset.blocks
    width = vocab_size if blocks is None else len(blocks) * TOKENS_PER_BLOCK
    step = max(1, CHUNK_ELEMENTS // width)
    if rows <= step and logits.device.type == "cpu":
        noise = (seed, position, subset)
        return _ranking_in_numpy(logits, temperature, floor, row_max, maxima, *noise, count)
    zeros = []
    for start in range(0, rows, step):
        leading = leading_bytes(seed[start : start + step], position[start : start + step], vocab_size, blocks)
        row, column = leading_zeros(leading, width)
        zeros.append((row + start if start else row, column))
    row, column = zeros[0] if len(zeros) == 1 else (torch.cat(part) for part in zip(*zeros, strict=True))
    if subset is not None:
        column = subset.column[column]
        exists = column >= 0
        row, column = row[exists], column[exists]
    # As many tokens as there are tiles reach their tile's maximum.
    likely = row_max if count == 1 else maxima.topk(count, sorted=True).values[:, -1]
    best = likely / temperature - MAX_BELOW_ZERO
    slack = row_max.abs() * 1e-6 + 1e-6  # several units in the last place of the largest logit, for rounding
    value = logits[row, column]
    reach = value >= torch.maximum(floor, (best - MAX_GUMBEL) * temperature - slack)[row]
    row, column, value = row[reach], column[reach], value[reach]
    token = column if subset is None else subset.ids[column]
    score = value / temperature[row] + gumbel(seed[row], position[row], token, torch.zeros_like(token))
    best = torch.maximum(best, _nth_best(row, token, score, rows, count))
    bound = torch.maximum(floor, (best - MAX_GUMBEL_ORDINARY) * temperature - slack)
    row_2, column_2 = at_least(logits, maxima, bound)
    token_2 = column_2 if subset is None else subset.ids[column_2]
    value_2 = logits[row_2, column_2]
    score_2 = value_2 / temperature[row_2] + gumbel(seed[row_2], position[row_2], token_2)
    row, token = torch.cat([row, row_2]), torch.cat([token, token_2])
    score, value = torch.cat([score, score_2]), torch.cat([value, value_2])
    return _ranking(row, token, score, value, rows, count, _last(vocab_size, subset))


def _ranking_in_numpy(
    logits: Tensor,
    temperature: Tensor,
    floor: Tensor,
    row_max: Tensor,
    maxima: Tensor,
    seed: Tensor,
    position: Tensor,
    subset: TokenSubset | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """`coupled_ranking` of few rows on a CPU, where calls cost more than what they do: numpy's cost less than torch's,
    and bounds from the leading bytes leave so few tokens that one Philox call is all."""
    rows, vocab_size = logits.shape
    leading = leading_bytes(seed, position, vocab_size, None if subset is None else subset.blocks).numpy()
    z, t, least = logits.numpy(), temperature.numpy(), floor.numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are bad
        zero_row, zero_place = np.divmod(np.flatnonzero(leading == 0), leading.shape[1])
        zero_column = zero_place if subset is None else subset.column.numpy()[zero_place]
        exists = (zero_column >= 0) & (zero_column < vocab_size)
        zero_row, zero_column = zero_row[exists], zero_column[exists]
        value = z[zero_row, zero_column]
        allowed = value >= least[zero_row]
        zero_row, zero_column, value = zero_row[allowed], zero_column[allowed], value[allowed]

        # As many tokens as there are tiles reach their tile's maximum.
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
        row, column, byte, scaled = row[kept], column[kept], byte[kept], scaled[kept]

    token = column if subset is None else subset.ids.numpy()[column]
    where = torch.from_numpy(row)
    noise = gumbel(seed[where], position[where], torch.from_numpy(token), torch.from_numpy(byte.astype(np.int64)))
    score = scaled + noise.numpy()
    order = np.lexsort((token, -score, row))
    row = row[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    tokens, values = np.full((rows, count), -1), np.full((rows, count), -np.inf, np.float32)
    tokens[:, 0] = _last(vocab_size, subset)
    listed = rank < count
    row, rank, order = row[listed], rank[listed], order[listed]
    tokens[row, rank] = token[order]
    values[row, rank] = z[row, column[order]]
    return torch.from_numpy(tokens), torch.from_numpy(values)


def _raise_to_nth(best: np.ndarray, row: np.ndarray, score: np.ndarray, n: int) -> None:
    """Raises best, [rows], to the row's n-th largest score where it has as many. In place. row, score: [N]."""
    if n == 1:
        np.maximum.at(best, row, score)
        return
    order = np.lexsort((-score, row))
    row, score = row[order], score[order]
    nth = np.arange(len(row)) - np.searchsorted(row, row) == n - 1
    best[row[nth]] = np.maximum(best[row[nth]], score[nth])


def _last(vocab_size: int, subset: TokenSubset | None) -> int | Tensor:
    return vocab_size - 1 if subset is None else subset.ids[-1]


def _nth_best(row: Tensor, token: Tensor, score: Tensor, rows: int, n: int) -> Tensor:
    """float32 [rows]: each row's n-th largest score, minus infinity where it has fewer. No token stands twice."""
    best = _best(row, score, rows)
    for _ in range(n - 1):
        chosen = _lowest(row, torch.where(score == best[row], token, _NO_TOKEN), rows)
        score = torch.where(token == chosen[row], -math.inf, score)
        best = _best(row, score, rows)
    return best


def _ranking(
    row: Tensor, token: Tensor, score: Tensor, value: Tensor, rows: int, count: int, otherwise: int | Tensor
) -> tuple[Tensor, Tensor]:
    """For each row the tokens of the best scores and their values, [rows, count]; the lowest id first among equals.
    row, token, score, value: [N]; a token may stand twice. otherwise: the first token of a row that has none."""
    tokens, values = [], []
    for place in range(count):
        best = _best(row, score, rows)
        chosen = _lowest(row, torch.where(score == best[row], token, _NO_TOKEN), rows)
        hit = token == chosen[row]
        left = best > -math.inf
        values.append(_best(row, torch.where(hit, value, -math.inf), rows).masked_fill(~left, -math.inf))
        if place:
            tokens.append(torch.where(left, chosen, -1))
        else:
            tokens.append(torch.where(chosen == _NO_TOKEN, otherwise, chosen))
        if place < count - 1:
            score = torch.where(hit, -math.inf, score)
    return torch.stack(tokens, dim=1), torch.stack(values, dim=1)


def _best(row: Tensor, score: Tensor, rows: int) -> Tensor:
    return torch.full((rows,), -math.inf, device=score.device).scatter_reduce(0, row, score, "amax")


def _lowest(row: Tensor, token: Tensor, rows: int) -> Tensor:
    return torch.full((rows,), _NO_TOKEN, device=token.device).scatter_reduce(0, row, token, "amin")
