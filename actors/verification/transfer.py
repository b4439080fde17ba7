"""Moves many small arrays between host and device, in one copy each way.

A copy from pageable memory makes the host wait for all earlier work of the device, and so does every read. On a CPU
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes. Triton compiles another kernel for pointers that are not multiples of it."""


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors on `device`; on a CPU they share memory. Does not wait for a GPU."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(arrays, device)


def in_one_copy(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies the arrays to `device` together, and returns aligned tensors that share one allocation there."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.nbytes] = array.ravel().view(np.uint8)
        start += size
    # torch's allocator does not reuse the pinned block before the copy is done.
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array.ravel()[:0]).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def in_one_read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors of one device to the host's memory, in one read. Waits for a GPU once."""
    # Tensors of large items come first, so that each one is aligned for its type.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    parts = [_as_bytes(tensors[index]) for index in order]
    read = torch.cat(parts).cpu().split([len(part) for part in parts])
    found = list(tensors)
    for index, part in zip(order, read, strict=True):
        found[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return found


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has finished this thread's work. Returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _as_bytes(tensor: Tensor) -> Tensor:
    # torch views only a stride of 1 as bytes, and a row of one number may have another.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
