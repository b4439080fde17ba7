"""Blocks that were large go back, whatever sizes came before."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, sys
from outrider.actors.serving.heap import return_large_blocks
if sys.argv[1] == "ours":
    assert return_large_blocks()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in "uordblks fordblks keepcost".split()]
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo2().hblks
block = libc.malloc(4 << 20)
print(libc.mallinfo2().hblks - before)
"""


def mapped(whose: str) -> int:
    """Blocks of their own for 4 MiB, after 8 MiB have come and gone."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, whose], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_a_large_block_is_one_of_its_own_after_a_larger_one_too() -> None:
    assert mapped("glibc's") == 0, "glibc has changed its habit: this is needed no more"
    assert mapped("ours") == 1
