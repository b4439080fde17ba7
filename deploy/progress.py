"""Progress on stderr: lines with the seconds since the start, a bar for what has a size. stdout stays for what other
programs read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Counted = Callable[[str, int], None]
"""(what is being done, bytes done so far)."""


_REPEAT_EVERY_S = 5.0


class Progress:
    """Says what is going on: ``say`` once, ``wait`` repeatedly while one thing lasts, ``counting`` around what has a
    known size."""

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
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

    @contextmanager
    def counting(self, total: int, done: int = 0) -> Iterator[Counted]:
        """Around work on ``total`` bytes, of which ``done`` are there already: what it yields is called often.

        On a terminal a bar with amount, speed and time left, which goes when the work ends; else lines, as ``wait``.
        """
        stream = self._stream or sys.stderr
        if not stream.isatty():
            yield lambda step, done: self.wait(f"{step},", f"{_mb(done)} of {_mb(total)} MB")
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars
        from rich.table import Column

        # One line on a narrow terminal too: the description is cut, and no figure is wrapped.
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=3)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )
        with Bars(*columns, console=Console(file=stream), expand=True, transient=True, redirect_stdout=False) as bars:
            task = bars.add_task("", total=total, completed=done)
            yield lambda step, done: bars.update(task, description=step, completed=done)


def _mb(size: int) -> int:
    return round(size / 1e6)
