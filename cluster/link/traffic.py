"""What went over a link: one received frame, ping times, counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Received(Generic[T]):
    """One DATA frame, decoded."""

    messages: T
    work_us: int
    """The sender's compute time. Of the frames of one `post` only the last carries it: sums are right."""

    sequence: int
    nbytes: int
    """Bytes in use, header and payload."""


@dataclass(frozen=True, slots=True)
class PingStats:
    """Round trips through both links' threads, microseconds."""

    min_us: float
    median_us: float
    max_us: float


@dataclass(slots=True)
class LinkCounters:
    """Frames of every kind; bytes in use (header and payload). Each field has one writing thread."""

    frames_sent: int = 0
    bytes_sent: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    data_frames_received: int = 0
    last_receive_monotonic_s: float | None = None
