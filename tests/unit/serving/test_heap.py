"""What was taken goes back: blocks that were large, whatever sizes came before, and pages between small ones in use."""

from __future__ import annotations

import subprocess
import sys

COMMON = """
import ctypes, sys, time
from outrider.actors.serving.heap import _resident_bytes, return_memory
if sys.argv[1] == "ours":
    assert return_memory(trim_every_s=0.05)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
"""

LARGE = """
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
    _fields_ += [(name, ctypes.c_size_t) for name in "uordblks fordblks keepcost".split()]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo2().hblks
block = libc.malloc(4 << 20)
print(libc.mallinfo2().hblks - before)
"""
"""Blocks of their own for 4 MiB, after 8 MiB have come and gone."""

SMALL = """
before = _resident_bytes()
blocks = []
for _ in range(1 << 15):
    blocks.append(libc.malloc(2000))
    ctypes.memset(blocks[-1], 1, 2000)
time.sleep(0.2)  # they are seen
last = libc.malloc(2000)  # in use, behind them all
for block in blocks:
    libc.free(block)
grown, give_up = _resident_bytes() - before, time.monotonic() + (60 if sys.argv[1] == "ours" else 0.5)
while _resident_bytes() - before > 32 << 20 and time.monotonic() < give_up:
    time.sleep(0.05)
print(_resident_bytes() - before >> 20)
"""
"""MiB left of 64 in small blocks that are free."""


CYCLES = """
import gc
class Held:
    def __init__(self):
        self.me, self.block = self, bytearray(1 << 20)
gc.disable()
before = _resident_bytes()
for _ in range(64):
    Held()
give_up = time.monotonic() + (60 if sys.argv[1] == "ours" else 0.5)
while _resident_bytes() - before > 32 << 20 and time.monotonic() < give_up:
    time.sleep(0.05)
print(_resident_bytes() - before >> 20)
"""
"""MiB left of 64 in objects that hold themselves."""


def printed(script: str, whose: str) -> int:
    command = [sys.executable, "-c", COMMON + script, whose]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)


def test_a_large_block_is_one_of_its_own_after_a_larger_one_too() -> None:
    assert printed(LARGE, "glibc's") == 0, "glibc has changed its habit: this is needed no more"
    assert printed(LARGE, "ours") == 1


def test_objects_that_hold_each_other_go_before_there_are_many() -> None:
    assert printed(CYCLES, "nobody's") > 32
    assert printed(CYCLES, "ours") <= 32


def test_pages_between_small_blocks_go_back() -> None:
    assert printed(SMALL, "glibc's") > 32, "glibc has changed its habit: this is needed no more"
    assert printed(SMALL, "ours") <= 32


def test_however_often_it_is_asked_for_one_thread_does_it() -> None:
    script = """
import threading
return_memory(trim_every_s=0.05)
print(sum(thread.name == "heap-trim" for thread in threading.enumerate()))
"""
    assert printed(script, "ours") == 1
