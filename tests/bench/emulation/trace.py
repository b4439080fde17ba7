"""When each emulated forward pass began and ended, written by the model itself: one instrument for both sides.

A trace is a file of fixed-size records that one process appends to, a write each, so that a reader sees whole records
at any time and nothing depends on how the process ends. Clocks are time.perf_counter, one clock for the machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

RECORD = np.dtype([("started_s", "f8"), ("due_s", "f8"), ("ended_s", "f8"), ("num_tokens", "i8")])
"""due_s: when the step should have ended; ended_s: when it did."""


class TraceWriter:
    """Appends to DIRECTORY/ROLE-PID.trace."""

    def __init__(self, directory: Path, role: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(directory / f"{role}-{os.getpid()}-{time.time_ns()}.trace", flags, 0o644)

    def add(self, started_s: float, due_s: float, ended_s: float, num_tokens: int) -> None:
        os.write(self._file, np.array([(started_s, due_s, ended_s, num_tokens)], RECORD).tobytes())


def read_trace(directory: Path, role: str, since_s: float, until_s: float) -> np.ndarray:
    """Records of a role's steps that started in [since_s, until_s), in order of time."""
    parts = [np.fromfile(path, RECORD) for path in directory.glob(f"{role}-*.trace")]
    steps = np.concatenate([np.empty(0, RECORD), *parts])
    steps = steps[(steps["started_s"] >= since_s) & (steps["started_s"] < until_s)]
    return np.sort(steps, order="started_s")
