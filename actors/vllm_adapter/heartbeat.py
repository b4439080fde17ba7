"""A replica's process that stands still is ended by its engine core, its child: Serve would take minutes to notice.

The replica's event loop beats into memory that the engine core has opened too. No file is left of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from outrider.actors.vllm_adapter.step_watch import WATCH_EVERY_S

logger = logging.getLogger(__name__)

HEARTBEAT = "outrider_heartbeat"
"""In vLLM's additional_config: Heartbeat.path."""

PATIENCE_S = 30.0
_BYTES = 8


class Heartbeat:
    """The replica's side. Nobody minds before start, nor after stop."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("outrider-heartbeat")
        self.path = f"/proc/{os.getpid()}/fd/{self._memory}"
        self._beating: asyncio.Task[None] | None = None
        self._over = False

    def start(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    def stop(self) -> None:
        """From any thread."""
        self._over = True
        self._write(0)

    async def _beat(self) -> None:
        beat = 0
        while not self._over:
            beat += 1
            self._write(beat)
            await asyncio.sleep(WATCH_EVERY_S)
        self._write(0)  # stop may have come between a look and its beat

    def _write(self, beat: int) -> None:
        os.pwrite(self._memory, beat.to_bytes(_BYTES, "little"), 0)


class BeatWatch:
    """Counts its own ticks rather than read a clock, as StepWatch does. Pure."""

    def __init__(self, patience_s: float, tick_s: float) -> None:
        self._patience_s, self._tick_s = patience_s, tick_s
        self._before = self._still = 0

    def tick(self, beat: int) -> bool:
        """Whether the heart has stood still for too long. beat: its number, 0: none is expected."""
        self._still = self._still + 1 if beat and beat == self._before else 0
        self._before = beat
        return self._still * self._tick_s > self._patience_s


def end_standing_replica(path: str, patience_s: float = PATIENCE_S, tick_s: float = WATCH_EVERY_S) -> None:
    """Watch until the replica's process, the parent of this one, is gone, and kill it when it stands still. path: see
    Heartbeat."""
    replica = int(path.split("/")[2])
    memory = os.open(path, os.O_RDONLY)
    watch = BeatWatch(patience_s, tick_s)
    while True:
        time.sleep(tick_s)
        late = watch.tick(int.from_bytes(os.pread(memory, _BYTES, 0), "little"))
        if os.getppid() != replica:
            return
        if late:
            logger.error("the replica's process %d stands still for over %g s: killed", replica, patience_s)
            os.kill(replica, signal.SIGKILL)
