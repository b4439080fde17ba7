"""Waits for running requests while a server is taken down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

ASK_EVERY_S = 0.5
REPORT_EVERY_S = 10.0


def drain(
    ask: Callable[[], int],
    limit_s: float,
    *,
    pressed: Callable[[float], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Returns how many requests are left unfinished.

    Args:
        ask: Has every ingress refuse new requests and returns how many are running; raises what Ray raises.
        limit_s: Longest wait.
        pressed: Sleeps for so many seconds and returns whether to wait no longer.
        say: Tells the operator.
        clock: A stand-in, in tests.
    """
    began, reported, before = clock(), -math.inf, 0
    try:
        while left := ask():
            waited_s = clock() - began
            if left < before or waited_s - reported >= REPORT_EVERY_S:
                reported, before = waited_s, left
                rest_s = max(0, math.ceil(limit_s - waited_s))
                say(f"requests running: {left}; waiting {rest_s} s at most, until another signal")
            if waited_s >= limit_s or pressed(min(ASK_EVERY_S, limit_s - waited_s)):
                say(f"requests ended unfinished: {left}")
                return left
    except Exception as error:  # noqa: BLE001 - whatever it is, there is nobody who could say more
        say(f"no ingress says what is running: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    return 0
