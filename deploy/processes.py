"""Turns signals into a request to stop, and ends all descendants of this process with the shared memory they leave."""

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
"""Matches segments of Intel's and LLVM's OpenMP and of PyTorch, whose names hold the id of their process. Python's own
(``psm_``) are removed by its resource tracker."""

_PR_SET_CHILD_SUBREAPER = 36


class Stopped(BaseException):
    """Interrupts the main thread at the first signal. It is no Exception, so that no handler takes it for a failure."""


class StopSignal:
    """Turns SIGINT and SIGTERM into ``Stopped`` until ``hold`` is called, and remembers those that come later."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interrupts = True
        self._again = threading.Event()

    def install(self) -> None:
        """Sets the handlers, from the main thread. Call it again after ray.init, which sets its own."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """Lets signals interrupt nothing from now on: cleaning up must run to its end."""
        self._interrupts = False

    def pressed(self, timeout_s: float) -> bool:
        """Sleeps. Returns whether a signal has come since ``hold``, which asks not to wait any longer."""
        return self._again.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Sleeps. Raises Stopped at a signal."""
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
    """Makes this process the parent of orphaned descendants, so that ``descendants`` finds them (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> list[psutil.Process]:
    """Returns every living descendant of this process, and reaps adopted ones that have ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
    return found


def end_descendants(grace_s: float) -> list[str]:
    """Waits for all descendants to end, then terminates and at last kills the rest. Returns a line for each that is
    still there."""
    for end, patience_s in ((None, grace_s), (psutil.Process.terminate, 3.0), (psutil.Process.kill, 3.0)):
        processes = descendants()  # each time anew, since children of an ended process become ours
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if end is not None:
                    end(process)
        psutil.wait_procs(processes, timeout=patience_s)
        if not descendants():
            return []
    return [f"process {process.pid}" for process in descendants()]


def remove_shared_memory(pids: Collection[int]) -> None:
    """Unlinks the segments in /dev/shm that are named after one of these processes and whose process has ended."""
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        owner = _NAMED_AFTER.match(path.name)
        if owner is not None and int(owner[1]) in pids and not psutil.pid_exists(int(owner[1])):
            with suppress(OSError):  # another user's, or gone meanwhile
                path.unlink()
