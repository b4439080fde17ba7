"""Leaving nothing behind: SIGINT and SIGTERM as a request to stop, the processes this one started, however deep, and
the shared memory they mapped.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

SHARED_MEMORY = Path("/dev/shm")

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
    """Which names in /dev/shm belong to descendants. ``note`` from time to time, while those that made them live.

    Only what is certainly theirs is ever removed: /dev/shm may be shared with programs whose processes, and their
    numbers, are not to be seen from here.
    """

    def __init__(self) -> None:
        self._before = _inodes()
        self._pids: set[int] = set()
        self._mapped: dict[str, int] = {}

    def note(self) -> None:
        pids = {process.pid for process in descendants()}
        self._pids |= pids
        self._mapped |= _mapped_inodes(pids)

    def theirs(self) -> set[str]:
        """New names of this user's that no living process uses, and that a descendant had mapped when noted, or that a
        runtime library names exactly so after one."""
        used = self._used()
        return {
            name
            for name, inode in self._new().items()
            if name not in used
            and (self._mapped.get(name) == inode or self._is_named_after_one(name))
            and _is_own(name)
        }

    def of_nobody(self) -> set[str]:
        """Names made since the start that no living process has mapped or is called by, other than ``theirs``."""
        living = set(psutil.pids())
        unused = self._new().keys() - self.theirs() - mapped_shared_memory(living)
        return {name for name in unused if not _numbers_in(name) & living}

    def remove_theirs(self) -> list[str]:
        """Unlink ``theirs``; call when their processes are gone. Returns the new names that are left although a
        descendant had them mapped, or they hold the number of one: they may be another program's."""
        remove_shared_memory(self.theirs())
        return sorted(name for name in self._new() if name in self._mapped or _numbers_in(name) & self._pids)

    def _new(self) -> dict[str, int]:
        """Names, with their inodes, that were not there at the start."""
        return {name: inode for name, inode in _inodes().items() if self._before.get(name) != inode}

    def _used(self) -> set[str]:
        """Names that a living process has mapped or open, or that a library in it may come back to."""
        living = set(psutil.pids())
        living -= {pid for pid in living & self._pids if _is_zombie(pid)}
        return mapped_shared_memory(living) | {name for name in shared_memory_entries() if _owner_in(name) in living}

    def _is_named_after_one(self, name: str) -> bool:
        return _owner_in(name) in self._pids


def _is_zombie(pid: int) -> bool:
    """Ended, though not collected yet: some of a killed process's threads may take a moment longer than its first."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _owner_in(name: str) -> int | None:
    """The process that a library names its segment after, mapping it only briefly. None for any other name."""
    if (openmp := re.fullmatch(r"__KMP_REGISTERED_LIB_(\d+)_(\d+)", name)) is not None:  # Intel's and LLVM's
        return int(openmp[1]) if int(openmp[2]) == os.getuid() else None
    torch = re.fullmatch(r"torch_(\d+)_\d+_\d+", name)
    return int(torch[1]) if torch is not None else None


def _numbers_in(name: str) -> set[int]:
    """Whole numbers in a name. The digits inside a random hexadecimal name are none."""
    return {int(number) for number in re.findall(r"(?<![0-9A-Za-z])\d{1,7}(?![0-9A-Za-z])", name)}


def _is_own(name: str) -> bool:
    try:
        return (SHARED_MEMORY / name).lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _inodes() -> dict[str, int]:
    """Inode of every name in /dev/shm. A name alone may be given to another segment meanwhile."""
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except FileNotFoundError:
        return {}


def _mapped_inodes(pids: Iterable[int]) -> dict[str, int]:
    """Names in /dev/shm, with their inodes, that the given processes have mapped or open and that still have a name."""
    found: dict[str, int] = {}
    prefix = f"{SHARED_MEMORY}/"
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            files = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # ended meanwhile
        fields = (line.split(maxsplit=5) for line in maps.splitlines() if prefix in line)
        seen = [(words[5], int(words[4])) for words in fields]
        for file in files:
            with suppress(FileNotFoundError):  # closed meanwhile
                seen.append((os.readlink(file), os.stat(file).st_ino))
        for path, inode in seen:
            if path.startswith(prefix) and not path.endswith("(deleted)"):
                found[path.removeprefix(prefix)] = inode
    return found


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that the given processes have mapped or open and that still have a name there."""
    return set(_mapped_inodes(pids))


def shared_memory_entries() -> set[str]:
    """Names that exist in /dev/shm now."""
    return set(_inodes())


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
