"""Constraints that were refused or ended, by reason, as the metrics of a replica have them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, get_args

from outrider.actors.replica_calls import RequestError

Reason = Literal[
    "kind", "size", "nesting", "invalid", "compile_time", "compile_memory", "mask_time", "step", "budget", "server"
]
"""``kind``: serving.structured_output does not let it in. ``invalid``: the compiler does not know it. ``mask_time``:
too slow when it was tried out; ``step``: where an answer had led it. ``budget``: its caller had too many refused
before it. ``server``: not its own fault."""

REASONS: tuple[Reason, ...] = get_args(Reason)


class Refusals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[Reason] = Counter()
        self._counting = threading.Lock()

    def count(self, reason: Reason) -> None:
        with self._counting:
            self._counts[reason] += 1

    def counts(self) -> dict[str, int]:
        """Every reason."""
        with self._counting:
            return {reason: self._counts[reason] for reason in REASONS}


REFUSALS = Refusals()
"""Of this process, a replica's. The engine's process counts none: what it ends, the replica tells the client of."""


def refused(reason: Reason, field: str, problem: str, fix: str) -> RequestError:
    """To be raised. Counts."""
    REFUSALS.count(reason)
    return RequestError(field, problem, fix)
