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

    ask: has every ingress refuse new requests and returns how many are running; raises what Ray raises. pressed: sleeps
    for so many seconds and returns whether to wait no longer.
    """
    began = reported = clock()
    try:
        left = before = ask()
        if left:
            say(
                f"{_requests(left)} running: refusing new ones, waiting {limit_s:g} s at most; another signal ends them"
            )
        while left:
            waited_s = clock() - began
            if waited_s >= limit_s or pressed(min(ASK_EVERY_S, limit_s - waited_s)):
                say(f"{_requests(left)} ended unfinished after {clock() - began:.1f} s")
                return left
            left = ask()
            if left and (left < before or clock() - reported >= REPORT_EVERY_S):
                reported, before = clock(), left
                say(f"{_requests(left)} running, {max(0, math.ceil(limit_s - (reported - began)))} s at most")
    except Exception as error:  # noqa: BLE001 - whatever it is, there is nobody who could say more
        say(f"no ingress says what is running: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    return 0


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
