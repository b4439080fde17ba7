"""Memory that stays with the process, for loops that need the same large blocks over and over."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of mallopt(3)."""


def keep_large_blocks() -> bool:
    """For the rest of this process: what is freed is kept for the next allocation.

    glibc gives large blocks back to the system and gets them anew, page by page and zeroed. Every step of a model on a
    CPU needs hundreds, and where page faults are dear, as in a sandbox, half of the time was seen to go into that.
    Returns whether the C library took it.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return library.mallopt(_M_MMAP_MAX, 0) == 1 and library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1) == 1
