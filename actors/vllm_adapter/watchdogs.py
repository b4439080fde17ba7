"""Detects an engine whose step stalls, and a replica whose event loop stalls.

`StepWatchdog` tells an engine that stalls from one that is slow, idle or was stopped. The replica's event loop writes a
`Heartbeat` into memory that its child, the engine core, reads; the child kills a replica that stalls, which Ray Serve
would notice minutes later.

Both count their own ticks instead of reading a clock: a tick that comes late, because this process was stopped or got
no core, counts as one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from statistics import median

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
MEDIANS = 20
"""How many times the median step a step may take."""

MEDIAN_STEPS = 64
"""The number of latest steps that the median is taken of."""

HEARTBEAT = "outrider_heartbeat"
"""The key of Heartbeat.path in vLLM's additional_config."""

STALLED_AFTER_S = 30.0
_BYTES = 8


class StepWatchdog:
    """Detects that no step of a busy engine ends.

    Call `stepped` with each output of the engine and `tick` every tick_s.

    least_s: the time that a step may take in any case, however short the median.
    """

    def __init__(
        self, least_s: float, tick_s: float = WATCH_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least_s, self._tick_s, self._clock = least_s, tick_s, clock
        self._step_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._last: float | None = None
        """When the last step ended; None while the engine is idle, and until its first step after that."""

        self._idle_ticks = 0

    def stepped(self) -> None:
        """Notes that a step has ended."""
        now = self._clock()
        if self._last is not None:
            self._step_s.append(now - self._last)
        self._last, self._idle_ticks = now, 0

    @property
    def usual_s(self) -> float:
        """Returns the median step, 0 before the first."""
        return median(self._step_s) if self._step_s else 0.0

    def tick(self, busy: bool) -> str | None:
        """Returns why the engine counts as stalled, or None. busy: whether it has requests."""
        if not busy:
            self._last, self._idle_ticks = None, 0
            return None
        self._idle_ticks += 1
        usual_s = self.usual_s
        still_s = self._idle_ticks * self._tick_s
        if still_s <= max(self._least_s, MEDIANS * usual_s):
            return None
        return f"no step of the engine has ended for {still_s:g} s; the usual one takes {usual_s:.3g} s"


class Heartbeat:
    """Writes the replica's heartbeat. None is expected before `start` and after `stop`."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("outrider-heartbeat")
        self.path = f"/proc/{os.getpid()}/fd/{self._memory}"
        self._beating: asyncio.Task[None] | None = None
        self._over = False

    def start(self) -> None:
        """Starts to beat, on the running event loop."""
        self._beating = asyncio.create_task(self._beat())

    def stop(self) -> None:
        """Stops the heartbeat. It may be called from any thread."""
        self._over = True
        self._write(0)

    async def _beat(self) -> None:
        beat = 0
        while not self._over:
            beat += 1
            self._write(beat)
            await asyncio.sleep(WATCH_EVERY_S)
        self._write(0)  # stop may have come between the check and the write

    def _write(self, beat: int) -> None:
        os.pwrite(self._memory, beat.to_bytes(_BYTES, "little"), 0)


class HeartbeatMonitor:
    """Detects a heartbeat that stalls. limit_s: the time that it may stall."""

    def __init__(self, limit_s: float, tick_s: float) -> None:
        self._limit_s, self._tick_s = limit_s, tick_s
        self._before = self._still = 0

    def tick(self, beat: int) -> bool:
        """Returns whether the heartbeat has stalled for too long. beat: its number, 0 where none is expected."""
        self._still = self._still + 1 if beat and beat == self._before else 0
        self._before = beat
        return self._still * self._tick_s > self._limit_s


def kill_stalled_replica(path: str, limit_s: float = STALLED_AFTER_S, tick_s: float = WATCH_EVERY_S) -> None:
    """Watches the replica's process, the parent of this one, until it is gone, and kills it when it stalls.

    path: `Heartbeat.path`.
    """
    replica = int(path.split("/")[2])
    memory = os.open(path, os.O_RDONLY)
    monitor = HeartbeatMonitor(limit_s, tick_s)
    while True:
        time.sleep(tick_s)
        stalled = monitor.tick(int.from_bytes(os.pread(memory, _BYTES, 0), "little"))
        if os.getppid() != replica:
            return
        if stalled:
            logger.error("the replica's process %d has stalled for over %g s and is killed", replica, limit_s)
            os.kill(replica, signal.SIGKILL)
