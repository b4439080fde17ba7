"""Finding a few tokens in rows of logits, of the whole vocabulary or of some of its tokens.

A row is looked at in tiles: their maxima cost one fast pass, and most questions then need a few tiles only.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.actors.verification.noise import TOKENS_PER_BLOCK

TILE = 1024
"""Tokens of a tile of mass, the unit of a draw by inversion."""

SEARCH_TILE = 128
"""Tokens of a tile when looking for a few large logits."""


def tile_size(vocab_size: int, tile: int = TILE) -> int:
    return min(tile, vocab_size)


def tile_maxima(logits: Tensor, tile: int) -> Tensor:
    """float32 [R, ceil(V / tile)]; NaN wins. logits: float32 [R, V]."""
    vocab_size = logits.shape[1]
    whole = vocab_size // tile * tile
    maxima = logits[:, :whole].unflatten(-1, (-1, tile)).amax(-1)
    if whole < vocab_size:
        maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=-1)
    return maxima


def search_maxima(logits: Tensor) -> Tensor:
    """Of tiles of SEARCH_TILE, for `argmax` and `at_least`."""
    return tile_maxima(logits, tile_size(logits.shape[1], SEARCH_TILE))


def argmax(logits: Tensor, row_max: Tensor, maxima: Tensor | None = None) -> Tensor:
    """int64 [R], the lowest id among equals; any id where row_max [R] is not finite. logits: float32 [R, V]. maxima:
    what `search_maxima` gives, if the caller has it.

    torch's own argmax is several times slower on a CPU.
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
    """Rows and ids, int64 [N] each, of all logits at or above their row's bound. logits: float32 [R, V]; maxima: of
    tiles of SEARCH_TILE; bound: float32 [R]. Syncs with the host on a GPU."""
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


def likeliest(logits: Tensor, n: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What logits.topk(n) gives. logits: float32 [M, V]; maxima: what `search_maxima` gives, for a few tiles to do on a
    CPU, where topk is slow: n tiles have n logits as large as any outside of them."""
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


class TokenSubset:
    """Which tokens the columns of logits stand for, when they are not the whole vocabulary. Noise belongs to tokens, so
    a choice among some is the choice among all with the others forbidden.

    ids: int64 [N], in any order, none twice. `blocks`, `place` and `column` are the CPU's: they find a column's leading
    byte, and a byte's column, without a look at the bytes of other tokens.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    @cached_property
    def blocks(self) -> Tensor:
        """int64 [M], ascending: the blocks of leading bytes that the tokens lie in."""
        block = self.ids.numpy() // TOKENS_PER_BLOCK
        present = np.zeros(int(block.max(initial=-1)) + 1, dtype=np.bool_)
        present[block] = True
        return torch.from_numpy(np.flatnonzero(present))

    @cached_property
    def place(self) -> Tensor:
        """int64 [N]: where each column's byte stands among the bytes of `blocks`."""
        ids, blocks = self.ids.numpy(), self.blocks.numpy()
        rank = np.empty(int(blocks.max(initial=-1)) + 1, dtype=np.int64)
        rank[blocks] = np.arange(0, len(blocks) * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
        return torch.from_numpy(rank[ids // TOKENS_PER_BLOCK] + ids % TOKENS_PER_BLOCK)

    @cached_property
    def column(self) -> Tensor:
        """int64 [16 M]: the column of each byte of `blocks`, -1 where its token is none of these."""
        column = np.full(len(self.blocks) * TOKENS_PER_BLOCK, -1)
        column[self.place.numpy()] = np.arange(len(self.ids))
        return torch.from_numpy(column)

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Where some tokens stand: int64 [E], N for one that is none of these. tokens: int64 [E]. No host sync."""
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
