"""What a test does not put down to the server must be what its own process was held up for, and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.stalls import TICK_S, Stalls

LOOK = """
import sys, time
from tests.stalls import Stalls
with Stalls() as stalls:
    start = time.monotonic()
    print("running", flush=True)
    sys.stdin.readline()
    time.sleep(0.1)
print(stalls.within_s(start, time.monotonic()), stalls.within_s(start - 9, start), flush=True)
"""
STOPPED_S = 1.0


def test_a_process_that_was_stopped_knows_for_how_long() -> None:
    with subprocess.Popen([sys.executable, "-c", LOOK], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(process.pid, signal.SIGCONT)
        print(file=process.stdin, flush=True)
        during, before = map(float, process.stdout.readline().split())
    assert during > STOPPED_S - 2 * TICK_S
    assert before == 0


def test_only_what_falls_into_a_wait_counts_for_it() -> None:
    stalls = Stalls()
    stalls._late = [(5.0, 6.0), (8.0, 8.5)]
    assert stalls.within_s(5.5, 8.25) == 0.75
    assert stalls.within_s(6.0, 8.0) == 0
