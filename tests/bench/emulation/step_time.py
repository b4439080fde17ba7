"""Computes how long a step of an emulated model takes, and waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

SPIN_S = 100e-6
"""The end of a wait that is spun: about what a sleep oversleeps. Longer spins would take the other actor's core."""


@dataclass(frozen=True)
class StepTime:
    """Memory-bound decoding: reading the weights costs the same for any batch, a token more costs little."""

    base_ms: float
    """Milliseconds of a step over one token."""

    extra_token_ms: float
    """For each further token in the step, a row of another request, a draft to verify or a prompt token alike."""

    def __post_init__(self) -> None:
        for name in ("base_ms", "extra_token_ms"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name}: {getattr(self, name):g} is negative; give milliseconds from 0 on")

    def step_ms(self, num_tokens: int) -> float:
        return self.base_ms + self.extra_token_ms * max(num_tokens - 1, 0)

    def times(self, factor: float) -> StepTime:
        return StepTime(self.base_ms * factor, self.extra_token_ms * factor)


def wait_until(end_s: float) -> None:
    """end_s: of time.perf_counter. Returns at once when it has passed."""
    while (left := end_s - time.perf_counter()) > 0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
