"""What a shutdown removes from /dev/shm: what is named after a process of its own that has ended, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider.deploy.processes import SHARED_MEMORY, remove_shared_memory


@pytest.fixture
def ended() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def names(ended: int) -> Iterator[dict[str, bool]]:
    """Names that are put there, and whether they are to be removed."""
    uid = os.getuid()
    found = {
        f"__KMP_REGISTERED_LIB_{ended}_{uid}": True,
        f"torch_{ended}_123456_0": True,
        f"torch_{os.getpid()}_123456_0": False,
        f"torch_{ended + 1}_123456_0": False,
        f"camera-{ended}": False,
        f"psm_{ended}": False,
    }
    for name in found:
        (SHARED_MEMORY / name).touch()
    yield found
    for name in found:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_what_is_named_after_a_process_of_ours_that_has_ended_goes(names: dict[str, bool], ended: int) -> None:
    remove_shared_memory({ended, os.getpid()})
    assert {name: not (SHARED_MEMORY / name).exists() for name in names} == names
