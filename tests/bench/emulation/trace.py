"""Records what an emulated device did and when its host came and went: one instrument for all.

A trace is two files that one process appends to, a write each a step, so that a reader sees whole records at any time
and nothing depends on how the process ends: ROLE-*.trace has a record for each forward pass, ROLE-*.rows one for each
of its tokens, in the same order. Clocks are time.perf_counter, one clock for the machine.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RECORD = np.dtype(
    [
        ("step", "i8"),
        ("called_s", "f8"),
        ("logits_s", "f8"),
        ("started_s", "f8"),
        ("ended_s", "f8"),
        ("read_s", "f8"),
        ("went_on_s", "f8"),
        ("num_tokens", "i8"),
    ]
)
"""step: of the device, forward passes with one read behind them all have the same. called_s: the host launched it.
logits_s: it launched what makes and reads logits; nan: never. started_s, ended_s: the device was busy with it. read_s:
the host came to read. went_on_s: it had what it read."""

ROW = np.dtype([("token", "i4"), ("position", "i4")])


class TraceWriter:
    """Appends to DIRECTORY/ROLE-PID-TIME.trace and .rows."""

    def __init__(self, directory: Path, role: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        stem = directory / f"{role}-{os.getpid()}-{time.time_ns()}"
        self._records, self._rows = (os.open(f"{stem}.{kind}", flags, 0o644) for kind in ("trace", "rows"))
        self._waiting: list[tuple[bytes, bytes]] = []

    def add(
        self,
        step: int,
        times: tuple[float, float, float, float, float, float],
        token_ids: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """times: the six of RECORD, in its order. Nothing is written before `flush`."""
        rows = np.empty(len(token_ids), ROW)
        rows["token"], rows["position"] = token_ids, positions
        self._waiting.append((np.array([(step, *times, len(rows))], RECORD).tobytes(), rows.tobytes()))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        os.write(self._rows, b"".join(rows for _, rows in waiting))  # before the records that count them
        os.write(self._records, b"".join(record for record, _ in waiting))


@dataclass(frozen=True)
class Trace:
    """forwards: RECORD [F], in order of started_s. rows: ROW [R], those of each forward one after another."""

    forwards: np.ndarray
    rows: np.ndarray

    def forward_of_row(self) -> np.ndarray:
        """int64 [R]: an index into forwards."""
        return np.repeat(np.arange(len(self.forwards)), self.forwards["num_tokens"])

    @classmethod
    def of(cls, forwards: np.ndarray, rows: np.ndarray) -> Trace:
        """Put in order of time. rows may hold more than forwards count, at the end."""
        ends = np.cumsum(forwards["num_tokens"])
        order = np.argsort(forwards["started_s"], kind="stable")
        counts = forwards["num_tokens"][order]
        first = np.repeat(ends[order] - counts, counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(forwards[order], rows[first + within])

    def between(self, since_s: float, until_s: float) -> Trace:
        """Forward passes that were launched in [since_s, until_s)."""
        inside = (self.forwards["called_s"] >= since_s) & (self.forwards["called_s"] < until_s)
        return Trace(self.forwards[inside], self.rows[np.repeat(inside, self.forwards["num_tokens"])])


def read_traces(directory: Path, role: str, since_s: float = 0.0, until_s: float = float("inf")) -> list[Trace]:
    """What each of a role's devices did in [since_s, until_s); those that did something."""
    found = []
    for path in sorted(directory.glob(f"{role}-*.trace")):
        records = np.fromfile(path, RECORD)
        rows = np.fromfile(path.with_suffix(".rows"), ROW)[: int(records["num_tokens"].sum())]
        found.append(Trace.of(records, rows).between(since_s, until_s))
    return [trace for trace in found if len(trace.forwards)]


def read_trace(directory: Path, role: str, since_s: float = 0.0, until_s: float = float("inf")) -> Trace:
    """Likewise, of a role that has one device at a time."""
    traces = read_traces(directory, role, since_s, until_s)
    forwards = np.concatenate([np.empty(0, RECORD), *(trace.forwards for trace in traces)])
    return Trace.of(forwards, np.concatenate([np.empty(0, ROW), *(trace.rows for trace in traces)]))
