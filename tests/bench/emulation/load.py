"""The requests that every side gets: a closed loop, so many at once until so many rounds had all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.emulation.text_process import NUM_LANES


@dataclass(frozen=True)
class Load:
    """batch requests in flight, each replaced when it ends, until `rounds` of them all were seen. What runs then ends
    in its own time: every requested token is waited for."""

    batch: int
    rounds: int
    max_tokens: int
    temperature: float = 0.0


class ClosedLoop:
    """Hands out the numbers of requests. Thread-safe."""

    def __init__(self, load: Load, is_enough: Callable[[], bool], first_index: int = 0) -> None:
        """is_enough: asked before each request beyond the first batch."""
        self._load, self._is_enough = load, is_enough
        self._indices = itertools.count(first_index)
        self._lock = threading.Lock()
        self.asked = 0
        """Requests handed out so far."""

    def first(self) -> list[int]:
        """A batch to begin with."""
        return [self._next() for _ in range(self._load.batch)]

    def after_one_ended(self) -> int | None:
        """What takes its place; None: it was enough."""
        return None if self._is_enough() else self._next()

    @property
    def tokens(self) -> int:
        """Asked for by all of them."""
        return self.asked * self._load.max_tokens

    def _next(self) -> int:
        with self._lock:
            self.asked += 1
            return next(self._indices)


def prompt(index: int) -> str:
    """Request number index: a byte a token. Neighbours end on different letters, and so in lanes of their own."""
    return f"request {index} " + "." * (index * 7 % 23) + chr(64 + index % NUM_LANES)
