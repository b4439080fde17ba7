"""What tests harm goes on afterwards, whatever became of the test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.cluster.processes import alive, slowed, stopped
from tests.support.cluster.serving import wait_until

RUN = "import time\nwhile True: time.sleep(0.001)"
WITHIN_S = 60.0


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", RUN]) as process:
        yield process
        process.kill()


def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


def test_a_stopped_process_goes_on_when_the_test_fails(victim: subprocess.Popen[bytes]) -> None:
    process = psutil.Process(victim.pid)

    def fail() -> None:
        with stopped(victim.pid):
            wait_until(lambda: is_stopped(process), WITHIN_S, "it stands still")
            raise RuntimeError("the test failed")

    with pytest.raises(RuntimeError):
        fail()
    wait_until(lambda: not is_stopped(process), WITHIN_S, "it goes on")


@pytest.mark.parametrize("harm", [stopped, lambda pid: slowed(pid, 0.5)], ids=["stopped", "slowed"])
def test_one_that_ends_meanwhile_is_no_failure_of_the_test_s(victim: subprocess.Popen[bytes], harm) -> None:  # type: ignore[no-untyped-def]
    with harm(victim.pid):
        victim.kill()
        victim.wait()
        time.sleep(0.3)
    assert alive([psutil.Process()]) == [f"{psutil.Process().pid} {psutil.Process().name()}"]
