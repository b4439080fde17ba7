"""A replica's heart that stands still is told from one that beats, has not begun, or is not to beat any more."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from outrider.actors.vllm_adapter import heartbeat
from outrider.actors.vllm_adapter.heartbeat import BeatWatch, Heartbeat, end_standing_replica

SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 0.5


def late(watch: BeatWatch, *beats: int) -> list[bool]:
    return [watch.tick(beat) for beat in beats]


def test_one_that_stands_still_is_late_once_patience_is_over() -> None:
    watch = BeatWatch(patience_s=3.0, tick_s=1.0)
    assert late(watch, 1, 2, 3, 3, 3, 3) == [False] * 6
    assert late(watch, 3) == [True]


def test_each_beat_begins_anew() -> None:
    watch = BeatWatch(patience_s=2.0, tick_s=1.0)
    assert late(watch, 1, 1, 1, 2, 2, 2, 3, 3, 3) == [False] * 9
    assert late(watch, 3) == [True]


def test_none_is_expected_before_the_first_nor_after_the_end() -> None:
    watch = BeatWatch(patience_s=1.0, tick_s=1.0)
    assert late(watch, *[0] * 9, 1, 1, *[0] * 9) == [False] * 20


class StoppedBetween(Heartbeat):
    """By another thread, between a look whether it is over and the beat that follows."""

    def _write(self, beat: int) -> None:
        if beat:
            self.stop()
        super()._write(beat)


def test_a_beat_that_is_written_after_the_end_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "WATCH_EVERY_S", 0.0)

    async def beat(heart: Heartbeat) -> None:
        heart.start()
        assert heart._beating is not None
        await heart._beating

    heart = StoppedBetween()
    asyncio.run(beat(heart))
    assert Path(heart.path).read_bytes() == bytes(8)


async def replica(is_over: bool) -> None:
    heart = Heartbeat()
    heart.start()
    await asyncio.sleep(0)
    SPAWN.Process(target=end_standing_replica, args=(heart.path, PATIENCE_S, 0.02), daemon=True).start()
    if is_over:
        heart.stop()
    stand_still(5 * PATIENCE_S if is_over else 600.0)


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


def run_replica(is_over: bool) -> None:
    asyncio.run(replica(is_over))


@pytest.mark.parametrize("is_over", [False, True])
def test_a_process_whose_event_loop_stands_still_is_killed_by_its_child(is_over: bool) -> None:
    process = SPAWN.Process(target=run_replica, args=(is_over,))
    process.start()
    process.join(300)
    assert process.exitcode == (0 if is_over else -signal.SIGKILL)
