"""What an engine's process has of the grammars of its requests: rooms that compile, and matchers that answer in time.

What the bounds come to. *Compiling* takes `Bounds.compile_s` of one core at most, in `compilers()` processes at a time,
callers by turns (`turns.py`); the kernel ends what takes longer, and what nobody waits for any more is ended too. It
gives way to the engine's own processes (NICENESS), and one caller's refused constraints take `Bounds.refused_s` a
minute. *A step*
waits for the masks of all of its requests, which are made at the same time: a request whose masks use up
`Bounds.mask_burst_s` of processor time is ended by the kernel, alone. None gives way to the others: the step waits for
it, and where it waited for a core, so would they all. So one hostile grammar can hold a step up by mask_burst_s once, A
of them at the same time by A × mask_burst_s / cores; but all answers of one request by 2 × mask_burst_s (`Siblings`),
once: that constraint is refused to others that are to have several.
What has not answered after that was given no core, which is no fault of its request: it is waited for up to
`Bounds.step_wait_s` (and once more where drafts are checked before the masks).
What a grammar shows on walks of its own is refused before it gets here, what shows only where a prompt leads it is
found in the step, and remembered. A sender who goes on with ever new ones can hold a step up with each of its requests,
until its seconds of the minute are used up, of which each such step counts as OVERRUN_COUNTS times what it took.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.actors.grammars.bounds import Allowance, Bounds, Ending
from outrider.actors.grammars.turns import Turn, Turns
from outrider.actors.grammars.worker import PROBE_S, SMALL_MESSAGE, receive, send

logger = logging.getLogger(__name__)

MOST_ROOMS = 16
MOST_ROOM_BYTES = 256 << 20
"""Of rooms that no request uses: what is over either is ended, the one first that was used longest ago."""

IDLE_S = 60.0
"""After which a room that no request uses is ended in any case."""

TIDY_S = 5.0
"""How often that is looked at."""

NICENESS, SUSPECTS_NICENESS = 10, 19
"""Of compiling for a caller with a clean record, and for one whose constraints were refused lately. Against one busy
process on the same core the first has a tenth of it and the second a 70th: a constraint that takes 0.1 s alone takes 1
to 2 s and 7 s. SCHED_IDLE would have it take over a minute, SCHED_BATCH gives nothing up."""

OVERRUN_COUNTS = 10
"""A step that was held up held everybody up."""

MOST_REFUSALS = 1024
"""Constraints that are remembered as refused, 32 bytes and a sentence each."""

START_S = 300.0
"""For the keeper: it imports torch, on a machine that may be busy."""

WALL_FACTOR, WALL_FLOOR_S = 100, 60.0
"""A room that does not answer in so many times its processor time has been stopped, or gets no core: at the higher
niceness, beside a busy process, it takes 70 times."""

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


CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Of a container, in versions 2 and 1 of cgroups."""


def cores() -> int:
    """That this process may keep busy."""
    here = len(os.sched_getaffinity(0))
    for files in CPU_QUOTAS:
        with suppress(OSError):
            return min(here, cores_of_quota(" ".join(Path(file).read_text() for file in files)) or here)
    return here


def cores_of_quota(text: str) -> int | None:
    """text: a quota and its period, as the kernel writes them. None: no quota."""
    try:
        quota, period = map(int, text.split())
        return max(1, math.ceil(quota / period)) if quota > 0 else None
    except (ValueError, ZeroDivisionError):  # max, in version 2; -1 is version 1's
        return None


def compilers() -> int:
    """How many constraints are compiled at a time; one fewer, of callers whose constraints were refused lately: what
    is compiled at their niceness may take long, and nobody else is to wait for it."""
    return max(2, cores() // 4)


@dataclass(frozen=True)
class Constraint:
    """kind: ``json``, ``ebnf``, ``lark``, ``regex`` or ``structural_tag``."""

    kind: str
    spec: str
    any_whitespace: bool = True

    @property
    def key(self) -> bytes:
        text = json.dumps([self.kind, self.any_whitespace, self.spec])
        return hashlib.sha256(text.encode()).digest()


@dataclass(eq=False)
class _Job:
    """waiting: by caller."""

    constraint: Constraint
    number: int
    waiting: list[tuple[int, Future[Room]]] = field(default_factory=list)
    in_queue: bool = True

    def is_wanted(self) -> bool:
        return any(not future.cancelled() for _, future in self.waiting)


class GrammarHost:
    """vocabulary: xgrammar's TokenizerInfo as JSON, asked for once, by a thread of this class. words: 32-bit words of a
    mask. most_rows: of one request in one step. Thread-safe."""

    def __init__(
        self,
        vocabulary: Callable[[], str],
        words: int,
        most_rows: int,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary, self.words, self.most_rows = vocabulary, words, most_rows
        self.bounds, self._clock = bounds or Bounds(), clock
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        longest_s = self.bounds.compile_s + PROBE_S + self.bounds.mask_burst_s
        self._turns: Turns[_Job] = Turns(longest_s, self.bounds.refused_s, clock)
        self._suspects = 0
        """Of the constraints that are being compiled."""

        self._jobs: dict[bytes, _Job] = {}
        self._rooms: dict[bytes, Room] = {}
        """Oldest use first."""

        self._refused: dict[bytes, Ending] = {}
        self._refused_to_several: dict[bytes, Ending] = {}
        """For several answers of one request."""

        self._closed = False
        self._ended = threading.Event()
        self._keeper: _Keeper | None = None
        self._starting = threading.Lock()
        self._compilers = compilers()
        for number in range(self._compilers):
            threading.Thread(target=self._compile, name=f"grammar-compiler-{number}", daemon=True).start()
        threading.Thread(target=self._keep_tidy, name="grammar-rooms", daemon=True).start()

    def warm_up(self) -> None:
        """Start the keeper now, in a thread; else the first constraint does."""
        threading.Thread(target=self._warm_up, name="grammar-keeper-start", daemon=True).start()

    def _warm_up(self) -> None:
        with suppress(ConstraintEnded):
            self._running_keeper()

    def compile(self, constraint: Constraint, caller: int = 0, *, several: bool = False) -> Future[Room]:
        """A room for the constraint, for one answer: see Room.leave. The future fails with ConstraintEnded. Cancelled
        by everybody who waits for it, the compiling is ended. caller: a number for whose it is; 0: nobody knows.
        several: its request has further answers."""
        future: Future[Room] = Future()
        key = constraint.key
        with self._changed:
            if (known := self._rooms.get(key)) is not None:
                self._hear(known)
            ending = self._refused.get(key) or (self._refused_to_several.get(key) if several else None)
            if ending is not None:
                future.set_exception(ConstraintEnded(ending))
                return future
            room = self._rooms.pop(key, None)
            if room is not None and room.alive:
                self._rooms[key] = room
                room.users += 1
                future.set_result(room)
                return future
            if room is not None:
                room.close()
            job = self._jobs.get(key)
            if job is None and (wait_s := self._turns.retry_after_s(caller)):
                future.set_exception(ConstraintEnded(self._too_many(wait_s)))
                return future
            if job is None:
                job = self._jobs[key] = _Job(constraint, next(self._numbers))
                self._turns.put(job, caller, len(constraint.spec))
            elif job.in_queue:
                self._turns.put(job, caller, len(constraint.spec))
            job.waiting.append((caller, future))
            self._changed.notify_all()
        return future

    def leave(self, room: Room) -> None:
        """One request less uses it."""
        with self._changed:
            room.users -= 1
            room.left_s = self._clock()
            self._hear(room)
            self._evict()

    def tidy(self) -> None:
        """End rooms that nobody has used for IDLE_S."""
        with self._changed:
            self._evict()

    def close(self) -> None:
        """End every process. Matchers answer no more."""
        self._ended.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for room in self._rooms.values():
                room.close()
            self._rooms.clear()
        with self._starting:
            if self._keeper is not None:
                self._keeper.end()

    def _keep_tidy(self) -> None:
        while not self._ended.wait(TIDY_S):
            self.tidy()

    def _compile(self) -> None:
        while (turn := self._next_turn()) is not None:
            result: Room | Ending | None = None
            used_s = 0.0
            try:
                result, used_s = self._room_of(turn)
            except ConstraintEnded as error:
                result = error.ending
            except Exception:  # this thread must live; the request hears that it was not its fault
                logger.exception("compiling a constraint failed")
                result = Ending("could not be compiled: the server's log says why", "server")
            self._resolve(turn, result, used_s)

    def _next_turn(self) -> Turn[_Job] | None:
        """None: the host is closed."""
        with self._changed:
            while not self._closed:
                turn = self._turns.take(suspects=self._suspects < self._compilers - 1)
                if turn is None:
                    self._changed.wait()
                    continue
                turn.job.in_queue = False
                if wait_s := self._turns.retry_after_s(turn.caller):
                    self._turns.done(turn, 0.0, wasted=False)
                    self._refuse(turn, self._too_many(wait_s))
                    continue
                self._suspects += turn.suspect
                return turn
        return None

    def _too_many(self, wait_s: float) -> Ending:
        return Ending(
            f"was not looked at: constraints from here that were refused took {self.bounds.refused_s:g} s of processor "
            f"time in a minute, which is the most; retry in {math.ceil(wait_s)} s",
            "budget",
            wait_s,
        )

    def _refuse(self, turn: Turn[_Job], ending: Ending) -> None:
        """Its caller alone: others may have it compiled."""
        job = turn.job
        theirs = [future for caller, future in job.waiting if caller == turn.caller]
        job.waiting = [(caller, future) for caller, future in job.waiting if caller != turn.caller]
        self._wait_again(job)
        for future in theirs:
            with suppress(InvalidStateError):
                future.set_exception(ConstraintEnded(ending))

    def _wait_again(self, job: _Job) -> None:
        """For those that still do."""
        job.waiting = [(caller, future) for caller, future in job.waiting if not future.cancelled()]
        for caller in {caller for caller, _ in job.waiting}:
            self._turns.put(job, caller, len(job.constraint.spec))
        job.in_queue = bool(job.waiting)
        if not job.waiting:
            self._jobs.pop(job.constraint.key, None)

    def _resolve(self, turn: Turn[_Job], result: Room | Ending | None, used_s: float) -> None:
        job = turn.job
        key = job.constraint.key
        with self._changed:
            self._suspects -= turn.suspect
            came_to_nothing = result is None or (isinstance(result, Ending) and result.is_clients)
            self._turns.done(turn, used_s, wasted=came_to_nothing)
            self._changed.notify_all()
            if result is None:  # given up; somebody else may have asked for the same since
                self._wait_again(job)
                return
            self._jobs.pop(key, None)
            if isinstance(result, Room):
                self._rooms[key] = result
                result.left_s = self._clock()
            elif result.is_clients:
                _remember(self._refused, key, result)
            for _, future in job.waiting:
                with suppress(InvalidStateError):
                    if isinstance(result, Room):
                        result.users += 1
                        try:
                            future.set_result(result)
                        except InvalidStateError:
                            result.users -= 1
                    else:
                        future.set_exception(ConstraintEnded(result))
            self._evict()

    def _hear(self, room: Room) -> None:
        """What it has to tell: which of its matchers have ended by what they used themselves."""
        for caller in room.overrun():
            _remember(self._refused, room.key, self.too_costly())
            self._turns.waste(caller, OVERRUN_COUNTS * self.bounds.mask_burst_s)

    def too_costly(self) -> Ending:
        """Of a request that was ended in a step."""
        return Ending(
            "is too costly where this answer has got to: choosing among the next tokens took over "
            f"{self.bounds.mask_burst_s * 1000:g} ms of processor time, or {self.bounds.matcher_bytes >> 20} MiB",
            "step",
        )

    def overdrew(self, room: Room, ending: Ending, caller: int) -> None:
        """By what one request's answers used together. The constraint may do for one."""
        with self._changed:
            _remember(self._refused_to_several, room.key, ending)
            self._turns.waste(caller, OVERRUN_COUNTS * self.bounds.mask_burst_s)

    def _room_of(self, turn: Turn[_Job]) -> tuple[Room | Ending | None, float]:
        """And the processor time it took. None: nobody wants it any more."""
        bounds, job = self.bounds, turn.job
        if not job.is_wanted():
            return None, 0.0
        keeper = self._running_keeper()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("constraint")
        room = Room(self, own, job.constraint.key)
        constraint = job.constraint
        try:
            os.write(text, constraint.spec.encode(errors="surrogatepass"))
            niceness = SUSPECTS_NICENESS if turn.suspect else NICENESS
            keeper.open(
                job.number,
                {"kind": constraint.kind, "any_whitespace": constraint.any_whitespace, "nice": niceness},
                [theirs.fileno(), text],
            )
        finally:
            theirs.close()
            os.close(text)
        give_up = self._clock() + max(WALL_FLOOR_S, WALL_FACTOR * bounds.compile_s)
        result: Room | Ending | None = None
        compiled = False
        while True:
            if not select.select([own], [], [], 0.1)[0]:
                if self._closed or not job.is_wanted():
                    break
                if self._clock() > give_up:
                    result = Ending("was not compiled in time: the server is too busy; retry", "server")
                    break
                continue
            answer, _ = receive(own)
            if answer is None:
                result = self._over(compiled, keeper)
                break
            if "compiled" in answer:
                compiled, room.bytes = True, answer["compiled"]
            elif "ready" in answer:
                room.close_later = lambda: keeper.close(job.number)
                return room, answer["ready"]
            elif "invalid" in answer:
                result = Ending(f"does not compile: {answer['invalid']}", "invalid")
                break
            elif "no_memory" in answer:
                result = Ending(f"takes more than {bounds.compile_bytes >> 20} MiB to compile", "compile_memory")
                break
            elif "too_large" in answer:
                result = Ending(
                    f"is too large when compiled: {answer['too_large'] >> 20} MiB, and {bounds.keep_bytes >> 20} are "
                    "the most",
                    "compile_memory",
                )
                break
            else:
                result = self._over(compiled, keeper)
                break
        own.close()
        return result, keeper.close(job.number, tell=True)

    def _over(self, compiled: bool, keeper: _Keeper) -> Ending:
        """Of a room that ended by a bound, in whatever phase."""
        bounds = self.bounds
        if not keeper.alive:
            return Ending("was not compiled: the process that does it ended; retry", "server")
        if compiled:
            return Ending(
                "leaves too much to try at each token: choosing among the next tokens takes over "
                f"{bounds.mask_burst_s * 1000:g} ms of processor time",
                "mask_time",
            )
        return Ending(f"takes more than {bounds.compile_s:g} s of processor time to compile", "compile_time")

    def _running_keeper(self) -> _Keeper:
        """Raises ConstraintEnded."""
        with self._starting:
            if self._closed:
                raise ConstraintEnded(Ending("was not compiled: the server is shutting down", "server"))
            if self._keeper is None or not self._keeper.alive:
                self._keeper = _Keeper(self._vocabulary(), self.bounds)
            return self._keeper

    def _evict(self) -> None:
        idle = [(key, room) for key, room in self._rooms.items() if not room.users]
        size = sum(room.bytes for _, room in idle)
        oldest_s = self._clock() - IDLE_S
        for number, (key, room) in enumerate(idle):
            fits = len(idle) - number <= MOST_ROOMS and size <= MOST_ROOM_BYTES
            if room.alive and fits and room.left_s > oldest_s and key not in self._refused:
                continue
            size -= room.bytes
            del self._rooms[key]
            room.close()


def _remember(refused: dict[bytes, Ending], key: bytes, ending: Ending) -> None:
    refused[key] = ending
    while len(refused) > MOST_REFUSALS:
        del refused[next(iter(refused))]


class _Keeper:
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


class Siblings:
    """Of the matchers of one request's answers. As many are asked at a time as there are cores, and they have as many
    times the allowance together. When one uses up its own, or all of them that, all have ended, without an answer and
    without being asked."""

    def __init__(self, bounds: Bounds, at_once: int | None = None) -> None:
        """at_once None: cores."""
        self.at_once = at_once or cores()
        self._bounds = bounds
        self._allowance = Allowance(bounds.mask_burst_s * self.at_once, bounds.mask_refill_s)
        self._ending: Ending | None = None
        self._matchers: list[Matcher] = []

    def enter(self, matcher: Matcher) -> None:
        self._matchers.append(matcher)
        matcher.ending = self._ending

    def leave(self, matcher: Matcher) -> None:
        self._matchers.remove(matcher)

    def end(self, ending: Ending) -> None:
        self._ending = ending
        for matcher in list(self._matchers):  # another thread may put a new one in
            matcher.ending = matcher.ending or ending

    def spend(self, used_s: float, masks: int) -> bool:
        """False: that was too much, and all have ended."""
        if enough := self._allowance.spend(used_s, masks):
            return enough
        burst_ms = self._bounds.mask_burst_s * self.at_once * 1000
        problem = f"is too costly for several answers: choosing among their next tokens took over {burst_ms:g} ms"
        self.end(Ending(f"{problem} of processor time together", "step"))
        return False


class Matcher:
    """One request's way through its grammar, in a process of its own. Not thread-safe; nothing here waits but `gather`.

    ending: why it answers no more, once it does not.
    """

    def __init__(
        self, room: Room, host: GrammarHost, stop_ids: Sequence[int], caller: int, siblings: Siblings | None
    ) -> None:
        self._room, self._host, self._stop_ids, self._caller = room, host, stop_ids, caller
        self.siblings = siblings
        self._question: dict[str, Any] = {}
        """For `gather` to send: one with siblings waits for its turn."""

        self._number: int | None = None
        self._own: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._accepted: list[int] = []
        """Which the process has not been told of. It is, with the next question."""

        self._closed = False
        self.ending: Ending | None = None
        if siblings is not None:
            siblings.enter(self)

    def accept(self, tokens: Iterable[int]) -> None:
        self._accepted.extend(map(int, tokens))

    def ask_valid(self, tokens: Sequence[int]) -> None:
        """How many of the tokens may follow: the answer's ``valid``."""
        self._ask({"validate": list(map(int, tokens))})

    def ask_masks(self, tokens: Sequence[int], grammar_start: int = 0, constraint_start: int = 0) -> None:
        """Masks behind none, one, … all of the tokens, for `masks`. Of grammar_start tokens the grammar knows nothing,
        and constraint_start masks allow everything."""
        fill = {"tokens": list(map(int, tokens)), "grammar_start": grammar_start, "constraint_start": constraint_start}
        self._ask({"fill": fill})

    def masks(self, rows: int) -> npt.NDArray[np.int32]:
        """As last answered: [rows, words], bit i of word w for token 32 w + i. The memory is the process's own."""
        assert self._memory is not None
        return np.frombuffer(self._memory, dtype=np.int32).reshape(-1, self._host.words)[:rows]

    def close(self) -> None:
        """The request has ended."""
        if self._closed:
            return
        self._closed = True
        self._memory = None  # and its file, whoever keeps this matcher
        if self._own is not None:
            self._own.close()
        if self.siblings is not None:
            self.siblings.leave(self)
        self._room.leave(self._number)

    def _ask(self, question: dict[str, Any]) -> None:
        self._question = question
        if self.siblings is None:
            self.send()

    def send(self) -> bool:
        """The question. False: it has ended, and answers none."""
        if self.ending is not None:
            return False
        try:
            own = self._own if self._own is not None else self._start()
            send(own, {"accept": self._accepted, **self._question})
            self._accepted = []
        except OSError:
            self._lost()
        return self.ending is None

    def _start(self) -> socket.socket:
        """Raises OSError."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("masks")
        try:
            os.ftruncate(memory, self._host.most_rows * self._host.words * 4)
            self._memory = mmap.mmap(memory, 0)
            own.setblocking(False)
            fds = [theirs.fileno(), memory]
            self._number = self._room.fork(self._stop_ids, self._caller, self._host.words, fds)
        finally:
            theirs.close()
            os.close(memory)
        self._own = own
        return own

    def fileno(self) -> int:
        assert self._own is not None
        return self._own.fileno()

    def take(self) -> dict[str, Any] | None:
        """The answer, when there is something to read. None: see ending."""
        assert self._own is not None
        try:
            answer, _ = receive(self._own, SMALL_MESSAGE)
        except OSError:
            answer = None
        if answer is None:
            self.ending = self._host.too_costly()
            if self.siblings is not None:
                self.siblings.end(self.ending)
        elif "refused" in answer:
            self.ending = Ending(f"does not allow token {answer['refused']}, which was chosen", "server")
        elif "used" in answer and self.siblings and not self.siblings.spend(answer["used"], answer["masks"]):
            assert self.ending is not None
            self._host.overdrew(self._room, self.ending, self._caller)
        else:
            return answer
        return None

    def late(self) -> None:
        """It did not answer while a step could wait."""
        self.ending = Ending("took too long on a busy server; retry", "server")

    def _lost(self) -> None:
        self.ending = Ending("was lost with the process that had it; retry", "server")


def gather(matchers: Iterable[Matcher], seconds: float) -> dict[Matcher, dict[str, Any]]:
    """The answers to what each was asked last. Those without one after so many seconds have an ending then: the kernel
    ends what takes too much of a processor long before, so these were stopped, or the machine gives them none."""
    answers: dict[Matcher, dict[str, Any]] = {}
    outstanding: dict[int, Matcher] = {}
    later: dict[Siblings, deque[Matcher]] = {}
    poll = select.poll()

    def wait_for(matcher: Matcher) -> None:
        outstanding[matcher.fileno()] = matcher
        poll.register(matcher.fileno(), select.POLLIN)

    def ask_next(siblings: Siblings) -> None:
        while later[siblings]:
            matcher = later[siblings].popleft()
            if matcher.send():
                wait_for(matcher)
                return

    for matcher in matchers:
        if matcher.ending is not None:
            continue
        if matcher.siblings is None:
            wait_for(matcher)
        else:
            later.setdefault(matcher.siblings, deque()).append(matcher)
    for siblings in later:
        for _ in range(siblings.at_once):
            ask_next(siblings)
    give_up = time.monotonic() + seconds
    while outstanding:
        ready = poll.poll(max(0.0, give_up - time.monotonic()) * 1000)
        siblings_ended = False
        for fd, _ in ready:
            matcher = outstanding.pop(fd)
            poll.unregister(fd)
            if matcher.ending is None and (answer := matcher.take()) is not None:
                answers[matcher] = answer
            if matcher.siblings is not None:
                siblings_ended |= matcher.ending is not None
                ask_next(matcher.siblings)
        for fd in [fd for fd, matcher in outstanding.items() if matcher.ending is not None] if siblings_ended else ():
            del outstanding[fd]
            poll.unregister(fd)
        if not ready and time.monotonic() >= give_up:
            for matcher in itertools.chain(outstanding.values(), *later.values()):
                matcher.late()
            break
    return answers
