"""The requests that both sides get: a closed loop, so many at once until so many are done."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.emulation.text_process import NUM_LANES


@dataclass(frozen=True)
class Load:
    """batch requests in flight, each replaced when it ends, until num_requests are done. Greedy."""

    batch: int
    num_requests: int
    max_tokens: int


def prompt(index: int) -> str:
    """Request number index: a byte a token. Neighbours end on different letters, and so in lanes of their own."""
    return f"request {index} " + "." * (index * 7 % 23) + chr(64 + index % NUM_LANES)
