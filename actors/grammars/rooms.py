"""Processes that hold compiled grammars: a keeper that forks rooms, and each room, which forks matchers.

What runs in them is `worker.py`.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.actors.grammars.bounds import Bounds, Ending
from outrider.actors.grammars.matching import Matcher, Siblings
from outrider.actors.grammars.worker import receive, send

if TYPE_CHECKING:
    from outrider.actors.grammars.host import GrammarHost

logger = logging.getLogger(__name__)

START_S = 300.0
"""For the keeper: it imports torch, on a machine that may be busy."""

_END_S = 5.0
"""For the keeper to say what a room has used."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # a second thread's would count against the limits of memory
}


class ConstraintEnded(Exception):
    """A constraint that is not served. args: an Ending."""

    @property
    def ending(self) -> Ending:
        return self.args[0]


class Keeper:
    """The process that forks rooms. Raises ConstraintEnded when it does not start."""

    def __init__(self, vocabulary: str, bounds: Bounds) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending = threading.Lock()
        memory = os.memfd_create("vocabulary")
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(vocabulary.encode())
            # A group of its own: an interrupt at the terminal is the engine's to act upon. No session of its own: Linux
            # may weigh sessions against each other, whatever the niceness of what is in them.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.actors.grammars.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # Where this process, which Ray may have started, has its packages from.
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            send(self._control, {"bounds": vars(bounds)}, [memory])
        finally:
            theirs.close()
            os.close(memory)
        started = select.select([self._control], [], [], START_S)[0]
        if not started or receive(self._control)[0] is None:
            self.end()
            logger.error("the process that compiles constraints did not start")
            raise ConstraintEnded(Ending("was not compiled: the process that does it did not start", "server"))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def open(self, number: int, message: dict[str, Any], fds: Sequence[int]) -> None:
        with self._sending:
            send(self._control, {"do": "open", "room": number, **message}, fds)

    def close(self, number: int, *, tell: bool = False) -> float:
        """tell: the processor time it has used is asked for, and waited for."""
        with self._sending, suppress(OSError):
            send(self._control, {"do": "end", "room": number, "tell": tell})
            while tell and select.select([self._control], [], [], _END_S)[0]:
                answer, _ = receive(self._control)
                if answer is None or answer["room"] == number:
                    return 0.0 if answer is None else float(answer["used"])
        return 0.0

    def end(self) -> None:
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
            return
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Room:
    """A compiled constraint. users: requests that have it. left_s: when the last one left."""

    def __init__(self, host: GrammarHost, own: socket.socket, key: bytes) -> None:
        self._host, self._own, self.key = host, own, key
        self.users = 0
        self.left_s = 0.0
        self.bytes = 0
        self.alive = True
        self.close_later: Callable[[], object] = lambda: None
        self._numbers = itertools.count()
        self._callers: dict[int, int] = {}
        """Of matchers, by their number, which the room tells of when they have overrun."""

    def leave(self, number: int | None = None) -> None:
        """One request less; number: its matcher's, where it has forked one."""
        self._host.leave(self)
        if number is not None:
            self._callers.pop(number, None)

    def matcher(self, stop_ids: Iterable[int], caller: int = 0, siblings: Siblings | None = None) -> Matcher:
        """Of one answer. Its process starts with the first question. siblings: of a request with several answers."""
        return Matcher(self, self._host, sorted(stop_ids), caller, siblings)

    def fork(self, stop_ids: Sequence[int], caller: int, words: int, fds: Sequence[int]) -> int:
        """The matcher's number. Raises OSError when the room is gone."""
        number = next(self._numbers)
        try:
            send(self._own, {"stop": list(stop_ids), "words": words, "matcher": number}, fds)
        except OSError:
            self.alive = False
            raise
        self._callers[number] = caller
        return number

    def overrun(self) -> list[int]:
        """Callers of matchers that ended by what they used, of which it has told since the last time."""
        callers = []
        with suppress(OSError, ValueError):  # closed
            while self.alive and select.select([self._own], [], [], 0)[0]:
                answer, _ = receive(self._own)
                if answer is None:
                    break
                callers.append(self._callers.get(answer["overran"], 0))
        return callers

    def close(self) -> None:
        self.alive = False
        self._own.close()
        self.close_later()
        self.close_later = lambda: None
