"""Leaving nothing behind: signals as a request to stop, the processes this one started, however deep, and the shared
memory that they leave when they are killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

SHARED_MEMORY = Path("/dev/shm")
_NAMED_AFTER = re.compile(r"(?:__KMP_REGISTERED_LIB|torch)_(\d+)_")
"""How Intel's and LLVM's OpenMP, and PyTorch, begin a segment's name: with the process that it is of. What Python makes
(``psm_``) its own resource tracker removes."""

_PR_SET_CHILD_SUBREAPER = 36


class Stopped(BaseException):
    """Raised in the main thread by the first signal while ``StopSignal`` interrupts. Not an Exception: nothing on the
    way up may take it for a failure."""


class StopSignal:
    """Turns SIGINT and SIGTERM into ``Stopped``, at once, until ``hold`` is called; later ones are only remembered."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interrupts = True
        self._again = threading.Event()

    def install(self) -> None:
        """From the main thread. Again after anything that sets handlers of its own, as ray.init does."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """From now on signals interrupt nothing: cleaning up must run to its end."""
        self._interrupts = False

    def pressed(self, timeout_s: float) -> bool:
        """Sleep. Returns whether a signal has come since `hold`: whoever sends it does not want to wait."""
        return self._again.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Sleep, or raise Stopped."""
        if self._event.wait(timeout_s):
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self._event.is_set()
        if not self._interrupts:
            self._again.set()
        self._event.set()
        if first and self._interrupts:
            raise Stopped


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (Linux), so that none escapes ``descendants``."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> list[psutil.Process]:
    """Returns every living process below this one. Collects those adopted ones that have ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return found


def end_descendants(grace_s: float) -> list[str]:
    """Waits up to ``grace_s`` seconds for every descendant to end by itself, then terminates and at last kills the
    rest. Returns one line per process that is still there after that."""
    for end, patience_s in ((None, grace_s), (psutil.Process.terminate, 3.0), (psutil.Process.kill, 3.0)):
        processes = descendants()  # again each time: a process that ends may hand its own children up to us
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if end is not None:
                    end(process)
        psutil.wait_procs(processes, timeout=patience_s)
        if not descendants():
            return []
    return [f"process {process.pid}" for process in descendants()]


def remove_shared_memory(pids: Collection[int]) -> None:
    """Unlinks what is named after one of these processes in /dev/shm, unless it lives."""
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        owner = _NAMED_AFTER.match(path.name)
        if owner is not None and int(owner[1]) in pids and not psutil.pid_exists(int(owner[1])):
            with suppress(OSError):  # another user's, or gone meanwhile
                path.unlink()
