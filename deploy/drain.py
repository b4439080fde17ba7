"""Taking a server down without cutting what it is in the middle of. No Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

ASK_EVERY_S = 0.5
TELL_EVERY_S = 10.0


def drain(
    ask: Callable[[str], int],
    limit_s: float,
    *,
    pressed: Callable[[float], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Returns how many answers were cut.

    ask: calls ``begin_drain`` or ``cut_drain`` of every ingress, for how many answers are left; raises what Ray raises.
    pressed: sleeps for so many seconds; whether to wait no longer.
    """
    began = told = clock()
    try:
        left = before = ask("begin_drain")
        if left:
            say(f"{_answers(left)} left: refusing new ones, waiting {limit_s:g} s at most; another signal cuts them")
        while left:
            waited_s = clock() - began
            if waited_s >= limit_s or pressed(min(ASK_EVERY_S, limit_s - waited_s)):
                left = ask("cut_drain")
                say(f"{_answers(left)} cut after {clock() - began:.1f} s")
                return left
            left = ask("begin_drain")
            if left and (left < before or clock() - told >= TELL_EVERY_S):
                told, before = clock(), left
                say(f"{_answers(left)} left, {max(0, math.ceil(limit_s - (told - began)))} s at most")
    except Exception as error:  # noqa: BLE001 - whatever it is, there is nobody who could say more
        say(f"no ingress says what is left: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    return 0


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"
