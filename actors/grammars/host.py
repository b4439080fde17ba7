"""Compiling the grammars of an engine's requests: whose turn it is, what is refused, and which rooms are kept.

Compiling takes `Bounds.compile_s` of one core at most, in `compilers()` processes at a time, callers by turns
(`turns.py`); the kernel ends what takes longer, and what nobody waits for any more is ended too. It gives way to the
engine's own processes (NICENESS), and one caller's refused constraints take `Bounds.refused_s` a minute. What a grammar
shows on walks of its own is refused before it gets to a step, what shows only where a prompt leads it is found there
(`matching.py`), and remembered. A sender who goes on with ever new ones can hold a step up with each of its requests,
until its seconds of the minute are used up, of which each such step counts as OVERRUN_COUNTS times what it took.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from outrider.actors.grammars.bounds import Bounds, Ending
from outrider.actors.grammars.rooms import ConstraintEnded, Keeper, Room
from outrider.actors.grammars.turns import Turn, Turns
from outrider.actors.grammars.worker import PROBE_S, receive
from outrider.cluster.cores import cores

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

WALL_FACTOR, WALL_FLOOR_S = 100, 60.0
"""A room that does not answer in so many times its processor time has been stopped, or gets no core: at the higher
niceness, beside a busy process, it takes 70 times."""


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
        self._keeper: Keeper | None = None
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
                result = Ending(f"does not compile: {answer['invalid']}".removesuffix(": "), "invalid")
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

    def _over(self, compiled: bool, keeper: Keeper) -> Ending:
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

    def _running_keeper(self) -> Keeper:
        """Raises ConstraintEnded."""
        with self._starting:
            if self._closed:
                raise ConstraintEnded(Ending("was not compiled: the server is shutting down", "server"))
            if self._keeper is None or not self._keeper.alive:
                self._keeper = Keeper(self._vocabulary(), self.bounds)
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
