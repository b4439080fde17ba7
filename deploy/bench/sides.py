"""The two sides as the alternation sees them: one turn at a time, and the CPU time of what stands behind each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import psutil

from deploy.bench.answers import Answer, Ask, SideName
from deploy.bench.arguments import Load
from deploy.bench.load import ask_all
from deploy.bench.other import InProcessEngine
from deploy.bench.server import ServerProcess
from deploy.client.sync_client import OutriderClient

SETTLE_WINDOW_S = 0.25
SETTLES_WITHIN_S = 10.0
UNKNOWN_SETTLE_S = 1.5
"""vLLM's worker queues poll for one second after their last message; for a server whose processes are not known."""

RESTING_CORES = 0.5
"""CPU seconds a second below which engines rest: one that polls takes a whole core, Ray's own processes a few per
cent."""

OnProgress = Callable[[int, int], None]


class Side(Protocol):
    name: SideName

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        """One turn: seconds from the first request to the last stream's end, and the answers. Raises BenchError."""

    def cpu_seconds(self) -> float | None:
        """Used so far by every process behind it. None: they are not known."""


class OurSide:
    """A server, asked over gRPC. server None: somebody else's, of which only the address is known."""

    def __init__(
        self, client: OutriderClient, load: Load, server: ServerProcess | None, name: SideName = "ours"
    ) -> None:
        self.name, self.client, self._load, self._server = name, client, load, server

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        return ask_all(self.client, asks, self._load.concurrency, on_progress, self._load.verification)

    def cpu_seconds(self) -> float | None:
        return None if self._server is None else total_cpu_seconds(self._server.processes())


class OtherSide:
    """vLLM's engine in a process of its own."""

    name: SideName = "other"

    def __init__(self, engine: InProcessEngine, load: Load) -> None:
        self._engine, self._load = engine, load

    def run(self, asks: Sequence[Ask], on_progress: OnProgress) -> tuple[float, list[Answer]]:
        return self._engine.run(asks, self._load.concurrency, on_progress)

    def cpu_seconds(self) -> float | None:
        return total_cpu_seconds(self._engine.processes())


def total_cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def busy_cpu_seconds() -> float:
    """Of this machine's cores so far, whoever used them."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # The kernel counts guests into user time, too.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)


def settle(sides: Sequence[Side], sleep: Callable[[float], None]) -> float:
    """Wait until no engine polls any more. Returns the CPU seconds a second that they last used together.

    sleep: waits, or raises. Gives up after SETTLES_WITHIN_S; whoever reports decides what that means.
    """
    if any(side.cpu_seconds() is None for side in sides):
        sleep(UNKNOWN_SETTLE_S)
    limit = time.monotonic() + SETTLES_WITHIN_S
    while True:
        before, started = _cpu_seconds(sides), time.monotonic()
        sleep(SETTLE_WINDOW_S)
        cores = max(_cpu_seconds(sides) - before, 0.0) / (time.monotonic() - started)
        if cores < RESTING_CORES or time.monotonic() > limit:
            return cores


def _cpu_seconds(sides: Sequence[Side]) -> float:
    return sum(side.cpu_seconds() or 0.0 for side in sides)
