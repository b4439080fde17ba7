"""Which names in /dev/shm a shutdown removes: those that are certainly of its own processes, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory

import pytest

from outrider.deploy.processes import SHARED_MEMORY, SharedMemoryWatch, mapped_shared_memory, remove_shared_memory

NAMES = """
import mmap, os, sys
for name in sys.argv[2:]:
    path = "/dev/shm/" + name.format(pid=os.getpid(), uid=os.getuid())
    with open(path, "wb" if sys.argv[1] == "make" else "r+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096) if sys.argv[1] == "map" else None
print("made", flush=True)
sys.stdin.read()
"""
"""A process that makes segments named after itself and lets go of them, or maps those that are there."""


@contextmanager
def child(action: str, *names: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", NAMES, action, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def leftovers() -> Iterator[set[str]]:
    """Names that a test puts here are gone after it."""
    names: set[str] = set()
    yield names
    remove_shared_memory(names)


def test_shared_memory_is_found_by_who_maps_it_and_removed() -> None:
    mine = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert mine.name in mapped_shared_memory([os.getpid()])
        assert mine.name not in mapped_shared_memory([os.getppid()])
        assert remove_shared_memory({mine.name, "not-there"}) == [mine.name]
        assert mine.name not in mapped_shared_memory([os.getpid()]), "a name that is gone is nothing to remove"
    finally:
        mine.close()
        shared_memory.SharedMemory(create=True, size=1, name=mine.name).unlink()  # for Python's own bookkeeping


def test_what_a_descendant_had_mapped_is_removed_when_that_was_killed(leftovers: set[str]) -> None:
    watch = SharedMemoryWatch()
    name = f"outrider-test-{os.getpid()}-mapped"
    leftovers.add(name)
    (SHARED_MEMORY / name).touch()
    with child("map", name) as process:
        watch.note()
        assert name not in watch.theirs(), "its process is alive"
        end(process)
        assert watch.theirs() == {name}
        assert watch.remove_theirs() == []
        assert not (SHARED_MEMORY / name).exists()


def test_a_killed_process_that_nobody_has_collected_holds_nothing(leftovers: set[str]) -> None:
    watch = SharedMemoryWatch()
    with child("make", "__KMP_REGISTERED_LIB_{pid}_{uid}") as process:
        name = f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}"
        leftovers.add(name)
        watch.note()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the table of processes
        assert watch.remove_theirs() == []
        assert not (SHARED_MEMORY / name).exists()


def test_what_a_runtime_names_after_its_process_is_removed_when_that_was_killed(leftovers: set[str]) -> None:
    watch = SharedMemoryWatch()
    with child("make", "__KMP_REGISTERED_LIB_{pid}_{uid}", "torch_{pid}_123456_0") as process:
        names = {f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}", f"torch_{process.pid}_123456_0"}
        leftovers.update(names)
        assert not names & watch.of_nobody(), "its process is alive"
        watch.note()
        assert not names & watch.theirs(), "its process is alive"
        end(process)
        assert watch.theirs() == names
        assert watch.remove_theirs() == []
        assert not any((SHARED_MEMORY / name).exists() for name in names)


def test_another_programs_that_holds_one_of_our_numbers_is_left_and_told(leftovers: set[str]) -> None:
    """Where the IPC namespace is shared, numbers of processes mean nothing; neither does a number that is no pid."""
    watch = SharedMemoryWatch()
    with child("make") as process:
        watch.note()
        uid = os.getuid()
        others = {
            f"camera-{process.pid}",
            f"shard_{process.pid}_of_70000",
            f"__KMP_REGISTERED_LIB_{process.pid}_{uid + 1}",
            f"__KMP_REGISTERED_LIB_{process.pid}_{uid}_backup",
            f"psm_{process.pid}",
        }
        leftovers.update(others)
        for name in others:
            (SHARED_MEMORY / name).touch()
        end(process)
        assert watch.theirs() == set()
        assert set(watch.remove_theirs()) == others
        assert all((SHARED_MEMORY / name).exists() for name in others)


def test_what_somebody_who_lives_has_mapped_is_left(leftovers: set[str]) -> None:
    watch = SharedMemoryWatch()
    with child("make", "__KMP_REGISTERED_LIB_{pid}_{uid}") as ours:
        name = f"__KMP_REGISTERED_LIB_{ours.pid}_{os.getuid()}"
        leftovers.add(name)
        watch.note()
        end(ours)
        with child("map", name):
            assert watch.remove_theirs() == [name]
            assert (SHARED_MEMORY / name).exists()
        assert watch.theirs() == {name}


def test_what_was_there_before_and_what_took_a_name_over_is_left(leftovers: set[str]) -> None:
    before, taken = (f"outrider-test-{os.getpid()}-{what}" for what in ("before", "taken"))
    leftovers |= {before, taken}
    (SHARED_MEMORY / before).touch()
    watch = SharedMemoryWatch()
    (SHARED_MEMORY / taken).touch()
    # Held open, so that its inode is not given out again.
    with (SHARED_MEMORY / taken).open("rb"), child("map", before, taken) as process:
        watch.note()
        end(process)
        (SHARED_MEMORY / taken).unlink()
        (SHARED_MEMORY / taken).touch()  # somebody else's now
        watch.remove_theirs()
    assert (SHARED_MEMORY / before).exists()
    assert (SHARED_MEMORY / taken).exists()


def test_what_another_user_owns_is_left(leftovers: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = SharedMemoryWatch()
    name = f"outrider-test-{os.getpid()}-owned"
    leftovers.add(name)
    (SHARED_MEMORY / name).touch()
    with child("map", name) as process:
        watch.note()
        end(process)
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(SHARED_MEMORY / name, 65534, -1)
    assert watch.theirs() == set()
    assert watch.remove_theirs() == [name]
