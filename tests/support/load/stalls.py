"""Records when this process did not get to run, which a test must not put down to the server."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

TICK_S = 0.01


class Stalls:
    """Records, from entering to leaving the with block, when a thread that sleeps a tick at a time was woken late."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        """Starts and ends, on the monotonic clock."""

        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def within_s(self, start: float, end: float) -> float:
        """Return for how long of that time the process was held up."""
        return sum(max(0.0, min(end, until) - max(start, since)) for since, until in list(self._late))

    def _run(self) -> None:
        due = time.monotonic() + TICK_S
        while not self._over.is_set():
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - due > TICK_S:
                self._late.append((due, now))
            due = now + TICK_S
