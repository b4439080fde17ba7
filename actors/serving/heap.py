"""What a large request took of memory goes back to the system when the request is over."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 256 << 10

_M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""


def return_large_blocks() -> bool:
    """For the rest of this process, which takes in strangers' requests and computes nothing.

    glibc maps a large block by itself, and unmaps it when it is freed; but after the first one of 8 MiB it takes all up
    to that size out of its heap, which what is small and lives on keeps from shrinking again. Returns whether the C
    library took it; others than glibc have no such habit.
    """
    library = ctypes.CDLL(None)
    return hasattr(library, "mallopt") and library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) == 1
