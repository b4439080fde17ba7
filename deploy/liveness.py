"""What a server asks of what it runs on: whether that is alive, and while it is taken down, what still runs. No Ray.

Serve mends much by itself: it starts a dead replica again, and Ray a dead controller. Neither is the end, unless it
takes longer than such a thing takes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

ASK_EVERY_S = 5.0
DRAIN_EVERY_S = 0.5
REPORT_EVERY_S = 10.0

ENDED_AFTER_S = 30.0
"""Without an answer of the controller: then it is ended, since one that stands still is nobody's to replace."""

CONTROLLER_PATIENCE_S = 90.0
"""Ray starts a dead controller again within seconds, and it reads its state back."""

GONE_PATIENCE_S = 30.0
"""For an application that the controller does not know: not while it reads its state back."""

REPLACING_PATIENCE_S = 900.0
"""Without one replica of some deployment that serves: a new one loads its models first."""


class ServerDied(Exception):
    """What a server runs on has ended without being asked to. The message says what."""


class ApplicationJudge:
    """Judges what the controller's answers, and their absence, amount to. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answered_s = self._served_s = self._there_s = clock()
        self._said = "no answer"
        self._is_ended = False
        """Since the last answer."""

    def answered(self, is_there: bool, serves: bool, said: str) -> None:
        """Takes an answer. is_there: the controller knows the application, and nobody takes it down."""
        with self._lock:
            self._answered_s, self._is_ended, self._said = self._clock(), False, " ".join(said.split())[:300]
            if is_there:
                self._there_s = self._answered_s
            if serves:
                self._served_s = self._answered_s

    def failed(self, problem: str) -> None:
        """The controller could not be asked."""
        with self._lock:
            self._said = " ".join(problem.split())[:300]
            self._there_s = self._clock()  # a controller that comes back reads its state back first

    def ends_controller(self) -> bool:
        """Returns whether to end the controller now: once, until it has answered again."""
        with self._lock:
            if self._is_ended or self._clock() - self._answered_s <= ENDED_AFTER_S:
                return False
            self._is_ended = True
            return True

    def verdict(self) -> str | None:
        """Returns what died, or None."""
        with self._lock:
            silent_s = self._clock() - self._answered_s
            gone_s, idle_s = self._answered_s - self._there_s, self._answered_s - self._served_s
        if silent_s > CONTROLLER_PATIENCE_S:
            return f"Serve's controller has not answered for {silent_s:.0f} s ({self._said})"
        if gone_s > GONE_PATIENCE_S:
            return "the application is gone; somebody else took it down"
        if idle_s > REPLACING_PATIENCE_S:
            return f"the application has had no replica that serves for {idle_s:.0f} s: {self._said}"
        return None


def keep_asking(ask: Callable[[], tuple[bool, bool, str]], judge: ApplicationJudge, stopped: threading.Event) -> None:
    """Asks until stopped, on a thread of its own: an answer may never come. ask: arguments of ``answered``; raises
    whatever Ray raises when there are none."""
    while not stopped.wait(ASK_EVERY_S):
        try:
            judge.answered(*ask())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer, and told when that lasts
            judge.failed(f"{type(error).__name__}: {error}")


def drain(
    ask: Callable[[], int],
    limit_s: float,
    *,
    pressed: Callable[[float], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Waits for running requests, limit_s at most. Returns how many are left unfinished.

    ask: has every ingress refuse new requests and returns how many are running; raises what Ray raises. pressed: sleeps
    for so many seconds and returns whether to wait no longer.
    """
    began, reported, before = clock(), -math.inf, 0
    try:
        while left := ask():
            waited_s = clock() - began
            if left < before or waited_s - reported >= REPORT_EVERY_S:
                reported, before = waited_s, left
                rest_s = max(0, math.ceil(limit_s - waited_s))
                say(f"requests running: {left}; waiting {rest_s} s at most, until another signal")
            if waited_s >= limit_s or pressed(min(DRAIN_EVERY_S, limit_s - waited_s)):
                say(f"requests ended unfinished: {left}")
                return left
    except Exception as error:  # noqa: BLE001 - whatever it is, there is nobody who could say more
        say(f"no ingress says what is running: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    return 0
