"""Progress on stderr: lines with the seconds since the start. stdout stays for what other programs read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_REPEAT_EVERY_S = 5.0


class Progress:
    """Says what is going on: ``say`` once, ``wait`` repeatedly while one thing lasts."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._start = stream, clock, clock()
        self._last_at = 0.0
        self._step = ""

    def say(self, text: str) -> None:
        """Print a line now."""
        self._last_at, self._step = self._clock(), text
        elapsed_s = self._last_at - self._start
        print(f"outrider: [{elapsed_s:4.0f} s] {text}", file=self._stream or sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say how long the block took when it is done. A block that raises is not done."""
        began = self._clock()
        yield
        self.done(name, self._clock() - began)

    def done(self, stage: str, seconds: float) -> None:
        """Print a stage that somebody else has timed."""
        self.say(f"  {stage}: {seconds:.1f} s")

    def wait(self, step: str, detail: str = "") -> None:
        """Print a line when the step is another one, or when nothing was printed for a while. Call often.

        detail may change all the time, as a count of bytes does.
        """
        if step != self._step or self._clock() - self._last_at >= _REPEAT_EVERY_S:
            self.say(f"{step} {detail}".rstrip())
            self._step = step
