"""Copies whole KV blocks in every layer with one kernel. On GPUs copying layer by layer is two launches each.

The addresses of blocks do not change while an engine lives, so they are sent to the device once. Independent of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.verification.transfer import to_device

WORD = 8
"""Bytes that are copied as one number."""

CHUNK = 1024
"""Words that one program copies."""


def block_regions(kv_caches: Iterable[Any], num_blocks: int) -> NDArray[np.int64] | None:
    """Returns the memory in which blocks lie at equal distances, each piece once.

    int64 [regions, 3]: the address of block 0, bytes from one block to the next, bytes to copy of each. Layers that
    share a KV cache, or a storage that holds nothing but blocks, are one region.

    kv_caches: of each layer, [num_blocks times a whole number, ...]: a block may be several of attention's. None where
    `BlockCopies` cannot copy: a layer's is no tensor, or bytes of others lie between those of a block, or their number
    or addresses are no multiples of WORD.
    """
    regions: dict[tuple[int, int, int], None] = {}
    for cache in kv_caches:
        if not isinstance(cache, Tensor) or len(cache) % num_blocks:
            return None
        pieces, step = len(cache) // num_blocks, cache.stride(0) * cache.element_size()
        storage = cache.untyped_storage()
        if storage.nbytes() == num_blocks * pieces * step:
            regions[storage.data_ptr(), pieces * step, pieces * step] = None
            continue
        piece = cache[0]
        reach = sum((count - 1) * stride for count, stride in zip(piece.shape, piece.stride(), strict=True))
        if 1 + reach != piece.numel():
            return None
        size = piece.nbytes
        if size == step:
            regions[cache.data_ptr(), pieces * step, pieces * step] = None
            continue
        for index in range(pieces):
            regions[cache.data_ptr() + index * step, pieces * step, size] = None
    found = np.array(list(regions), np.int64).reshape(-1, 3)
    return found if len(found) and not (found % WORD).any() else None


@triton.jit
def copy_chunk(copies, regions, CHUNK: tl.constexpr, WORD: tl.constexpr):
    """Copies one chunk of a block: there is a program for each copy, region and chunk."""
    source, target = tl.load(copies + 2 * tl.program_id(0)), tl.load(copies + 2 * tl.program_id(0) + 1)
    region = regions + 3 * tl.program_id(1)
    first, step, size = tl.load(region), tl.load(region + 1), tl.load(region + 2)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = word < size // WORD
    read = (first + source * step).to(tl.pointer_type(tl.int64))
    write = (first + target * step).to(tl.pointer_type(tl.int64))
    tl.store(write + word, tl.load(read + word, mask=inside), mask=inside)


class BlockCopies:
    """Copies blocks of KV caches whose addresses do not change."""

    def __init__(self, regions: NDArray[np.int64], device: torch.device) -> None:
        """regions: from `block_regions`."""
        self._device = device
        (self._regions,) = to_device([regions], device)
        self._grid = len(regions), triton.cdiv(int(regions[:, 2].max()), CHUNK * WORD)

    def __call__(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, (from, to) ids, in one launch. No block may be in both places: copies are in no order."""
        (there,) = to_device([np.array(copies, np.int64)], self._device)
        copy_chunk[(len(copies), *self._grid)](there, self._regions, CHUNK=CHUNK, WORD=WORD)


def block_copies(kv_caches: Iterable[Any], num_blocks: int, device: torch.device) -> BlockCopies | None:
    """Returns None where one kernel cannot copy them, see `block_regions`."""
    regions = block_regions(kv_caches, num_blocks)
    return None if regions is None else BlockCopies(regions, device)
