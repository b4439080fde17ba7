"""Whether what a server runs on is alive: judged from what its processes and Serve's controller show. No Ray.

Serve mends much by itself: it starts a dead replica again, and Ray a dead controller. Neither is the end, unless it
takes longer than such a thing takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

ASK_EVERY_S = 5.0

ENDED_AFTER_S = 30.0
"""Without an answer of the controller: then it is ended, since one that stands still is nobody's to replace."""

CONTROLLER_PATIENCE_S = 90.0
"""Ray starts a dead controller again within seconds, and it reads its state back."""

GONE_PATIENCE_S = 30.0
"""For an application that the controller does not know, or takes down: not while it reads its state back."""

REPLACING_PATIENCE_S = 900.0
"""Without one replica of some deployment that serves: a new one loads its models first."""


class ServerDied(Exception):
    """What a server runs on has ended without being asked to. The message says what."""


@dataclass(frozen=True)
class ApplicationState:
    """status: of the application, in Serve's words; None when the controller does not know it. serves: every deployment
    of it has a running replica."""

    status: str | None
    serves: bool
    message: str = ""


class ApplicationJudge:
    """What the controller's answers, and their absence, amount to. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._state = ApplicationState("RUNNING", serves=True)
        self._answered_s = clock()
        self._problem = "no answer"
        self._is_ended = False
        """Since the last answer."""

        self._gone_since_s: float | None = None
        self._idle_since_s: float | None = None
        """When the first of the answers came that have said so ever since."""

    def answered(self, state: ApplicationState) -> None:
        with self._lock:
            now = self._clock()
            self._state, self._answered_s, self._is_ended = state, now, False
            self._gone_since_s = _since(self._gone_since_s, state.status in (None, "DELETING"), now)
            self._idle_since_s = _since(self._idle_since_s, not state.serves, now)

    def failed(self, problem: str) -> None:
        """The controller could not be asked."""
        with self._lock:
            self._problem = " ".join(problem.split())[:300]
            self._gone_since_s = None  # a controller that comes back reads its state back first

    def ends_controller(self) -> bool:
        """Whether to end the controller now: once, until it has answered again."""
        with self._lock:
            if self._is_ended or self._clock() - self._answered_s <= ENDED_AFTER_S:
                return False
            self._is_ended = True
            return True

    def verdict(self) -> str | None:
        """What died, or None."""
        with self._lock:
            now = self._clock()
            if now - self._answered_s > CONTROLLER_PATIENCE_S:
                return f"Serve's controller has not answered for {now - self._answered_s:.0f} s ({self._problem})"
            state = self._state
            # Up to the last answer: what it said may have changed since.
            if self._gone_since_s is not None and self._answered_s - self._gone_since_s > GONE_PATIENCE_S:
                how = "is gone" if state.status is None else "is being deleted"
                return f"the application {self._name!r} {how}; somebody else took it down"
            if self._idle_since_s is not None and self._answered_s - self._idle_since_s > REPLACING_PATIENCE_S:
                said = f": {' '.join(state.message.split())[:300]}" if state.message else ""
                return (
                    f"the application {self._name!r} is {state.status} and has had no replica that serves for "
                    f"{self._answered_s - self._idle_since_s:.0f} s{said}"
                )
            return None


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def keep_asking(ask: Callable[[], ApplicationState], judge: ApplicationJudge, stopped: threading.Event) -> None:
    """For a thread of its own: an answer may never come.

    ask: raises whatever Ray raises when there is none.
    """
    while not stopped.wait(ASK_EVERY_S):
        try:
            state = ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer, and told when that lasts
            judge.failed(f"{type(error).__name__}: {error}")
        else:
            judge.answered(state)
