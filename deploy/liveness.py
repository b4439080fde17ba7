"""Decides whether the application of a server is still alive, and waits for running requests at the end. No Ray.

Serve restarts a dead replica, and Ray a dead controller. A server ends only when that takes longer than it may.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

ASK_EVERY_S = 5.0
DRAIN_EVERY_S = 0.5
REPORT_EVERY_S = 10.0

CONTROLLER_PATIENCE_S = 90.0
"""Longest time without an answer of Serve's controller. Ray restarts a dead one within seconds."""

GONE_PATIENCE_S = 30.0
"""Longest time in which the controller answers and does not know the application."""

REPLACING_PATIENCE_S = 900.0
"""Longest time without a replica that serves: a new one loads its models first."""


class ServerDied(Exception):
    """Says which part of a server has ended by itself."""


class ApplicationHealth:
    """Decides from the answers of Serve's controller whether the application has ended. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answered_s = self._served_s = self._there_s = clock()
        self._said = "no answer"

    def answered(self, is_there: bool, serves: bool, said: str) -> None:
        """Notes an answer.

        Args:
            is_there: The controller knows the application, which is not being deleted.
            serves: Each deployment that is needed has a running replica.
            said: The controller's messages.
        """
        with self._lock:
            self._answered_s, self._said = self._clock(), " ".join(said.split())[:300]
            if is_there:
                self._there_s = self._answered_s
            if serves:
                self._served_s = self._answered_s

    def failed(self, problem: str) -> None:
        """Notes that the controller could not be asked."""
        with self._lock:
            self._said = " ".join(problem.split())[:300]
            self._there_s = self._clock()  # a controller that comes back reads its state back first

    def failure(self) -> str | None:
        """Returns which part has ended, or None."""
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


def keep_asking(ask: Callable[[], tuple[bool, bool, str]], health: ApplicationHealth, stopped: threading.Event) -> None:
    """Asks the controller until stopped, on a thread of its own, since an answer may never come.

    Args:
        ask: Returns the arguments of ``ApplicationHealth.answered``; raises what Ray raises without an answer.
    """
    while not stopped.wait(ASK_EVERY_S):
        try:
            health.answered(*ask())
        except Exception as error:  # noqa: BLE001 - any error means that there is no answer
            health.failed(f"{type(error).__name__}: {error}")


def drain(
    ask: Callable[[], int],
    limit_s: float,
    *,
    pressed: Callable[[float], bool],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Waits for running requests, limit_s at most. Returns how many are left unfinished.

    Args:
        ask: Has every ingress refuse new requests and returns how many are running; raises what Ray raises.
        pressed: Sleeps for that many seconds and returns whether to stop waiting.
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
    except Exception as error:  # noqa: BLE001 - nobody else knows what is running
        say(f"no ingress says what is running: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    return 0
