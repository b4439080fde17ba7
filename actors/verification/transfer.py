"""Many small arrays between host and device, in one copy each way.

A copy from ordinary memory has the host wait for all that the device was given before it, and so does every read. On a
CPU nothing is copied.
"""

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
    """The arrays as tensors on `device`; on a CPU they share memory. Does not wait for a GPU."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return in_one_copy(arrays, device)


def in_one_copy(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors that are parts of one, each aligned."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[start : start + array.nbytes] = array.ravel().view(np.uint8)
        start += size
    # The pinned block is not used again before the copy is done: torch's allocator sees to that.
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: array.nbytes].view(torch.from_numpy(array.ravel()[:0]).dtype).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def in_one_read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of one device, in the host's memory: parts of one there. Waits for a GPU once."""
    # Large items first, so that each tensor begins where its type may.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    parts = [_as_bytes(tensors[index]) for index in order]
    read = torch.cat(parts).cpu().split([len(part) for part in parts])
    found = list(tensors)
    for index, part in zip(order, read, strict=True):
        found[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return found


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has done all that this thread gave it. Returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _as_bytes(tensor: Tensor) -> Tensor:
    # A row of one number may have any stride, and torch views no other than 1 as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
