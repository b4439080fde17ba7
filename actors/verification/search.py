"""Finds a few tokens in rows of logits, of the whole vocabulary or of some of its tokens.

The maxima of a row's tiles cost one fast pass, and most searches then read a few tiles only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.actors.verification.noise import TOKENS_PER_BLOCK
from outrider.cluster.link.messages import TAUGHT_TOP

TILE = 1024
"""Tokens in a tile whose mass is summed, the unit of a draw by inversion."""

CHUNK_ELEMENTS = 1 << 19
"""Logits that a CPU works on at once, so that intermediate values stay in cache."""

SEARCH_TILE = 128
"""Tokens in a tile when looking for a few large logits."""

LEAST_LOG_P = -60.0
"""The least log-probability that `target_top_k` returns."""


def tile_size(vocab_size: int, tile: int = TILE) -> int:
    return min(tile, vocab_size)


def tile_maxima(logits: Tensor, tile: int) -> Tensor:
    """Returns each tile's largest logit, float32 [R, ceil(V / tile)]; NaN wins. logits: float32 [R, V]."""
    vocab_size = logits.shape[1]
    whole = vocab_size // tile * tile
    maxima = logits[:, :whole].unflatten(-1, (-1, tile)).amax(-1)
    if whole < vocab_size:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=-1)
    return maxima


def search_maxima(logits: Tensor) -> Tensor:
    """Returns the maxima of tiles of SEARCH_TILE, for `argmax`, `at_least` and `top_n`."""
    return tile_maxima(logits, tile_size(logits.shape[1], SEARCH_TILE))


def argmax(logits: Tensor, row_max: Tensor, maxima: Tensor | None = None) -> Tensor:
    """Returns the column of each row's largest logit, int64 [R], the lowest among equals.

    torch's own argmax is several times slower on a CPU. logits: float32 [R, V]; row_max: float32 [R], where it is not
    finite any column is returned; maxima: the result of `search_maxima`, if the caller has it.
    """
    rows, vocab_size = logits.shape
    tile = tile_size(vocab_size, SEARCH_TILE)
    maxima = search_maxima(logits) if maxima is None else maxima
    largest = row_max.unsqueeze(1)
    first = (maxima == largest).view(torch.uint8).argmax(-1)
    if vocab_size % tile == 0 and logits.is_contiguous():
        tiles = torch.arange(0, rows * (vocab_size // tile), vocab_size // tile, device=logits.device)
        inside = logits.view(-1, tile).index_select(0, tiles + first)
    else:
        ids = first.unsqueeze(1) * tile + torch.arange(tile, device=logits.device)
        inside = logits.gather(1, ids.clamp_max(vocab_size - 1))
    place = (inside == largest).view(torch.uint8).argmax(-1)
    return (first * tile + place).clamp_max(vocab_size - 1)


def at_least(logits: Tensor, maxima: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows and columns, int64 [N] each, of all logits at or above their row's bound. Waits for a GPU.

    logits: float32 [R, V]; maxima: the result of `search_maxima`; bound: float32 [R].
    """
    vocab_size = logits.shape[1]
    tile = tile_size(vocab_size, SEARCH_TILE)
    row, tile_of = (maxima >= bound.unsqueeze(1)).nonzero(as_tuple=True)
    if vocab_size % tile == 0 and logits.is_contiguous():
        # Whole tiles are copied, several times faster than single values.
        values = logits.view(-1, tile).index_select(0, row * (vocab_size // tile) + tile_of)
    else:
        ids = tile_of.unsqueeze(1) * tile + torch.arange(tile, device=logits.device)
        values = logits[row.unsqueeze(1), ids.clamp_max(vocab_size - 1)]
        values = values.masked_fill(ids >= vocab_size, torch.nan)  # compares false
    hit, place = (values >= bound[row].unsqueeze(1)).nonzero(as_tuple=True)
    return row[hit], tile_of[hit] * tile + place


def top_n(logits: Tensor, n: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns what logits.topk(n) returns, on a CPU much faster if the caller has `search_maxima`.

    The n tiles with the largest maxima have n logits as large as any outside of them. logits: float32 [M, V].
    """
    rows, vocab_size = logits.shape
    n = min(n, vocab_size)
    if maxima is None or 2 * n > maxima.shape[1] or vocab_size % SEARCH_TILE or not logits.is_contiguous():
        values, ids = logits.topk(n, dim=-1)
        return values, ids
    tiles = maxima.topk(n, dim=-1, sorted=False).indices
    first = torch.arange(0, rows * maxima.shape[1], maxima.shape[1], device=logits.device).unsqueeze(1)
    inside = logits.view(-1, SEARCH_TILE).index_select(0, (first + tiles).flatten()).view(rows, -1)
    values, place = inside.topk(n, dim=-1)
    return values, tiles.gather(1, place // SEARCH_TILE) * SEARCH_TILE + place % SEARCH_TILE


def target_top_k(logits: Tensor, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the target's TAUGHT_TOP likeliest tokens of some rows, for a drafter that learns.

    Args:
        logits: [R, V], any floating type.

    Returns:
        ids, int32 [n, TAUGHT_TOP], likeliest first, and their log-probabilities at temperature 1, float16. A row that
        is not finite has LEAST_LOG_P everywhere.
    """
    chosen = logits[torch.tensor(rows, device=logits.device)].float()
    top = chosen.topk(min(TAUGHT_TOP, chosen.shape[1]), dim=-1)
    log_p = (top.values - chosen.logsumexp(-1, keepdim=True)).nan_to_num(nan=LEAST_LOG_P, posinf=LEAST_LOG_P)
    # One copy from the device, not two.
    both = torch.stack([top.indices.to(torch.float64), log_p.to(torch.float64)]).cpu().numpy()
    return both[0].astype(np.int32), np.clip(both[1], LEAST_LOG_P, 0.0).astype(np.float16)


class TokenSubset:
    """Maps the columns of logits to tokens, where they are not the whole vocabulary.

    Noise belongs to tokens, so a choice among some is the choice among all with the others forbidden.

    ids: int64 [N], in any order, none twice. `blocks`, `place` and `column` are for the CPU: they find a column's
    leading byte, and a byte's column, without reading the bytes of other tokens.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    @cached_property
    def blocks(self) -> Tensor:
        """Returns the blocks of leading bytes that hold the tokens, int64 [M], ascending."""
        block = self.ids.numpy() // TOKENS_PER_BLOCK
        present = np.zeros(int(block.max(initial=-1)) + 1, dtype=np.bool_)
        present[block] = True
        return torch.from_numpy(np.flatnonzero(present))

    @cached_property
    def place(self) -> Tensor:
        """Returns the index of each column's byte among the bytes of `blocks`, int64 [N]."""
        ids, blocks = self.ids.numpy(), self.blocks.numpy()
        rank = np.empty(int(blocks.max(initial=-1)) + 1, dtype=np.int64)
        rank[blocks] = np.arange(0, len(blocks) * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
        return torch.from_numpy(rank[ids // TOKENS_PER_BLOCK] + ids % TOKENS_PER_BLOCK)

    @cached_property
    def column(self) -> Tensor:
        """Returns the column of each byte of `blocks`, int64 [16 M], -1 where its token is not in the subset."""
        column = np.full(len(self.blocks) * TOKENS_PER_BLOCK, -1)
        column[self.place.numpy()] = np.arange(len(self.ids))
        return torch.from_numpy(column)

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Returns the columns of tokens, int64 [E], N for one that is not in the subset. Does not wait for a GPU."""
        if self.ids.device.type == "cpu":
            blocks, block = self.blocks, tokens // TOKENS_PER_BLOCK
            rank = torch.searchsorted(blocks, block).clamp_max(len(blocks) - 1)
            columns = self.column[rank * TOKENS_PER_BLOCK + tokens % TOKENS_PER_BLOCK]
            exists = (blocks[rank] == block) & (columns >= 0)
        else:
            ordered, order = self.ids.sort()
            rank = torch.searchsorted(ordered, tokens).clamp_max(len(ordered) - 1)
            columns, exists = order[rank], ordered[rank] == tokens
        return torch.where(exists, columns, len(self.ids))
