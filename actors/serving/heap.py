"""What requests took of memory goes back to the system when they are over."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import time

LARGE_BYTES = 256 << 10

TRIM_EVERY_S = 10.0
TRIM_BYTES = 16 << 20
"""By how much a process is larger than it has been before its heaps are gone through, a few milliseconds' work."""

_M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""


@functools.cache
def return_memory(trim_every_s: float = TRIM_EVERY_S) -> bool:
    """For the rest of this process, however often it is asked for, which takes in strangers' requests and computes
    nothing.

    glibc maps a large block by itself, and unmaps it when it is freed; but after the first one of 8 MiB it takes all up
    to that size out of its heap, which what is small and lives on keeps from shrinking again. And a heap shrinks from
    its end only, of which each thread has one: of a burst's small blocks what lies below the last one in use stays, so
    pages without any are looked for now and then, in a thread of its own. So are objects that hold each other: of a TLS
    connection that was pipelined on, or never ended its handshake, 150 KiB, some hundreds of which are there before
    Python looks for any that have been there for long. Returns whether the C library took it; others
    than glibc have no such habits.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) == 1):
        return False
    arguments = library, trim_every_s, _resident_bytes()
    threading.Thread(target=_trim, args=arguments, name="heap-trim", daemon=True).start()
    return True


def _trim(library: ctypes.CDLL, every_s: float, least: int) -> None:
    while True:
        time.sleep(every_s)
        now = _resident_bytes()
        least = min(least, now)
        if now - least > TRIM_BYTES:
            gc.collect()
            library.malloc_trim(0)  # without the interpreter's lock


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
