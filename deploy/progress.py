"""Prints progress on stderr, with the seconds since the start. stdout is left to the output of commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_REPEAT_EVERY_S = 5.0


class Progress:
    """Prints what is going on: ``say`` once, ``wait`` repeatedly while a step lasts."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._start = stream, clock, clock()
        self._last_at = 0.0
        self._step = ""

    def say(self, text: str) -> None:
        """Prints a line."""
        self._last_at, self._step = self._clock(), text
        elapsed_s = self._last_at - self._start
        print(f"outrider: [{elapsed_s:4.0f} s] {text}", file=self._stream or sys.stderr, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Prints how long the block took, unless it raises."""
        began = self._clock()
        yield
        self.say(f"  {name}: {self._clock() - began:.1f} s")

    def wait(self, step: str, detail: str = "") -> None:
        """Prints a line when the step changes, and from time to time while it lasts. Call it often.

        Args:
            detail: May be another one at each call.
        """
        if step != self._step or self._clock() - self._last_at >= _REPEAT_EVERY_S:
            self.say(f"{step} {detail}".rstrip())
            self._step = step
