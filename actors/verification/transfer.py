"""Small host arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are not multiples of it."""


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays, of one dimension, as tensors on `device`; on a CPU they share memory. Does not wait for a GPU."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(arrays, device)


def in_one_copy(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors that are parts of one, each aligned."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.nbytes] = array.view(np.uint8)
        start += size
    # The pinned block is not used again before the copy is done: torch's allocator sees to that.
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array[:0]).dtype) for part, array in zip(parts, arrays, strict=True)
    ]
