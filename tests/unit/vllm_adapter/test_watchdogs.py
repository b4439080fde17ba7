"""Detects a replica whose event loop stalls. test_step_watchdog.py covers an engine's step."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from typing import Any

import pytest

from outrider.actors.vllm_adapter.watchdogs import Heartbeat, HeartbeatMonitor, kill_stalled_replica

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 0.5


@pytest.mark.parametrize(
    "beats",
    [
        [1, 2, 3, 3, 3, 3, (3,)],
        [1, 1, 1, 1, 2, 2, 2, 2, (2,)],
        [*[0] * 9, 1, 1, 1, *[0] * 9],
    ],
    ids=["stalls", "every beat counts anew", "none is expected before start and after stop"],
)
def test_a_heartbeat_that_stalls_for_longer_than_the_limit_is_detected(beats: list[Any]) -> None:
    """A beat in brackets is the one at which the stall is detected."""
    monitor = HeartbeatMonitor(limit_s=3.0, tick_s=1.0)
    for beat in beats:
        number, detected = (beat[0], True) if isinstance(beat, tuple) else (beat, False)
        assert monitor.tick(number) is detected


async def replica(is_over: bool) -> None:
    heart = Heartbeat()
    heart.start()
    await asyncio.sleep(0)
    SPAWN.Process(target=kill_stalled_replica, args=(heart.path, LIMIT_S, 0.02), daemon=True).start()
    if is_over:
        heart.stop()
    stand_still(5 * LIMIT_S if is_over else 600.0)


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


def run_replica(is_over: bool) -> None:
    asyncio.run(replica(is_over))


@pytest.mark.parametrize("is_over", [False, True])
def test_a_process_whose_event_loop_stalls_is_killed_by_its_child(is_over: bool) -> None:
    process = SPAWN.Process(target=run_replica, args=(is_over,))
    process.start()
    process.join(300)
    assert process.exitcode == (0 if is_over else -signal.SIGKILL)
