"""Leaving nothing behind: the processes this one started, however deep, and the shared memory they mapped."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (Linux), so that none escapes ``descendants``."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> list[psutil.Process]:
    """Every living process below this one; zombies do not live."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def reap_orphans() -> None:
    """Collect the exit status of adopted processes that ended, which otherwise stay in the process table."""
    for process in psutil.Process().children():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def end_descendants(grace_s: float) -> list[str]:
    """Wait up to ``grace_s`` seconds for every descendant to end by itself, then terminate and at last kill the rest.

    Returns one line per process that is still there after that; empty when all are gone.
    """
    for signal_them, patience_s in ((None, grace_s), (psutil.Process.terminate, 3.0), (psutil.Process.kill, 3.0)):
        # Again each time: a process that ends may hand its own children up to us.
        processes = descendants()
        if signal_them is not None:
            for process in processes:
                try:
                    signal_them(process)
                except psutil.NoSuchProcess:
                    continue
        psutil.wait_procs(processes, timeout=patience_s)
        if not descendants():
            break
    reap_orphans()
    return [describe(process) for process in descendants()]


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


class SharedMemoryWatch:
    """Which names in /dev/shm belong to descendants. ``note`` from time to time, while those that made them live."""

    def __init__(self) -> None:
        self._before = shared_memory_entries()
        self._pids: set[int] = set()
        self._mapped: set[str] = set()

    def note(self) -> None:
        pids = {process.pid for process in descendants()}
        self._pids |= pids
        self._mapped |= mapped_shared_memory(pids)

    def theirs(self) -> set[str]:
        """Names that are there now: mapped by a descendant when noted, or made since the start and called after one."""
        entries = shared_memory_entries()
        return (entries & self._mapped) | {name for name in entries - self._before if _pids_in(name) & self._pids}

    def of_nobody(self) -> set[str]:
        """Names made since the start that no living process has mapped or is called by, other than ``theirs``."""
        new = shared_memory_entries() - self._before - self.theirs()
        living = set(psutil.pids())
        return {name for name in new - mapped_shared_memory(living) if not _pids_in(name) & living}


def _pids_in(name: str) -> set[int]:
    """Whole numbers in a name. Intel's OpenMP runtime makes ``__KMP_REGISTERED_LIB_<pid>_<uid>``, mapped only briefly.

    The digits inside a random hexadecimal name are none.
    """
    return {int(number) for number in re.findall(r"(?<![0-9A-Za-z])\d{1,7}(?![0-9A-Za-z])", name)}


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that the given processes have mapped or open and that still have a name there."""
    names: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # ended meanwhile
        mapped = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line)
        names.update(
            path.removeprefix(f"{SHARED_MEMORY}/")
            for path in [*mapped, *links]
            if path.startswith(f"{SHARED_MEMORY}/") and not path.endswith("(deleted)")
        )
    return names


def shared_memory_entries() -> set[str]:
    """Names that exist in /dev/shm now."""
    try:
        return {entry.name for entry in SHARED_MEMORY.iterdir()}
    except FileNotFoundError:
        return set()


def remove_shared_memory(names: Iterable[str]) -> list[str]:
    """Unlink ``names`` in /dev/shm. Call when their processes are gone. Returns those that were still there."""
    removed = []
    for name in sorted(names):
        try:
            (SHARED_MEMORY / name).unlink()
            removed.append(name)
        except (FileNotFoundError, IsADirectoryError):
            continue
    return removed


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
