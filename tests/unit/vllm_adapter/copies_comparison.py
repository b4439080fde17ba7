"""Run by test_block_copies.py in a process of its own, with TRITON_INTERPRET=1 set before Triton is imported; and on a
GPU by tests/gpu, compiled. Compares copies of KV blocks by one kernel with copies layer by layer, in every layout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.actors.drafter.block_copies import CHUNK, block_copies

BLOCKS = 7
Device = torch.device | str
Copies = Sequence[tuple[int, int]]
COPIES: list[Copies] = [[(0, 1)], [(6, 0), (2, 5), (6, 3)]]


def layer(device: Device, *shape: int) -> Tensor:
    """bfloat16, its bytes different from block to block."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device).to(torch.int16).view(torch.bfloat16).view(shape)


def layouts(device: Device) -> dict[str, list[Tensor]]:
    """KV caches of an engine's layers, by how they lie in memory."""
    shared = layer(device, BLOCKS, 3, 2, 4, 8)
    raw = torch.arange(3 * BLOCKS * 64, device=device).to(torch.uint8).view(3, BLOCKS, 64)
    return {
        "a storage a layer": [layer(device, BLOCKS, 2, 16, 2, 8) for _ in range(3)],
        "more than a chunk, and not whole chunks": [layer(device, BLOCKS, 2, 4 * CHUNK + 20) for _ in range(2)],
        "heads before tokens": [layer(device, BLOCKS, 2, 2, 16, 8).transpose(2, 3)],
        "layers of one storage, block by block": [shared[:, index] for index in range(3)],
        "layers of one storage, one after the other": list(layer(device, 3, BLOCKS, 2, 4, 8)),
        "two layers with one cache": [layer(device, BLOCKS, 2, 4, 8)] * 2,
        "blocks of several of attention's": [layer(device, BLOCKS * 4, 2, 4, 8)],
        "the same, with room between them": [layer(device, 4 + BLOCKS * 4, 3, 2, 8)[4:, :2]],
        "blocks in a storage with more in it": [layer(device, BLOCKS + 2, 2, 4, 8)[1:-1]],
        "single bytes": list(raw),
    }


def compare(device: Device, reference: Callable[[list[Tensor], int, Copies], None]) -> list[str]:
    """Return the layouts in which some byte differs."""
    different = []
    for name, caches in layouts(device).items():
        copy, expected = block_copies(caches, BLOCKS, torch.device(device)), layouts(device)[name]
        assert copy is not None, name
        for copies in COPIES:
            copy(copies)
            reference(expected, BLOCKS, copies)
            pairs = zip(caches, expected, strict=True)
            if not all(torch.equal(whole_storage(cache), whole_storage(other)) for cache, other in pairs):
                different.append(name)
    return different


def whole_storage(cache: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())


def main() -> int:
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

    if different := compare("cpu", copy_kv_cache_blocks_inplace):
        print("blocks are copied otherwise than vLLM does:", *different, sep="\n")
        return 1
    print(f"{len(layouts('cpu'))} layouts alike")
    return 0


if __name__ == "__main__":
    sys.exit(main())
