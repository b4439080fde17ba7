"""A row of logits in tiles: their maxima cost one fast pass, and most questions then need a few tiles only."""

from __future__ import annotations

import torch
from torch import Tensor

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
