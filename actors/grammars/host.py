"""What an engine's process has of the grammars of its requests: rooms that compile, and matchers that answer in time.

What the bounds come to. *Compiling* takes `Bounds.compile_s` of one core at most, in `compilers()` processes at a time,
smaller constraints first; the kernel ends what takes longer, and what nobody waits for any more is ended too. *A step*
waits for the masks of all of its requests, which are made at the same time: a request whose masks use up
`Bounds.mask_burst_s` of processor time is ended by the kernel, alone. None gives way to the others: the step waits for
it, and where it waited for a core, so would they all. So one hostile grammar can hold a step up by mask_burst_s once, A
of them at the same time by A × mask_burst_s / cores, and never by more than `Bounds.step_wait_s` from the first answer
on (ten times that where the machine is too busy for any; a second such wait where drafts are checked before the masks).
A sender who goes on can do so with each of its requests:
what a grammar shows on walks of its own is refused before it gets here, what shows only where a prompt leads it is
found in the step.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.actors.grammars.bounds import Bounds, Ending
from outrider.actors.grammars.worker import SMALL_MESSAGE, receive, send

logger = logging.getLogger(__name__)

MOST_ROOMS = 16
MOST_ROOM_BYTES = 256 << 20
"""Of rooms that no request uses: what is over either is ended, the one first that was used longest ago."""

MOST_REFUSALS = 1024
"""Constraints that are remembered as refused, 32 bytes and a sentence each."""

PATIENCE = 10
"""See gather."""

START_S = 300.0
"""For the keeper: it imports torch, on a machine that may be busy."""

WALL_FACTOR, WALL_FLOOR_S = 30, 60.0
"""A room that does not answer in so many times its processor time has been stopped, or gets no core."""

_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ConstraintEnded(Exception):
    """A constraint that is not served. args: an Ending."""

    @property
    def ending(self) -> Ending:
        return self.args[0]


def compilers() -> int:
    """How many constraints are compiled at a time."""
    return max(1, len(os.sched_getaffinity(0)) // 4)


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


@dataclass
class _Job:
    constraint: Constraint
    number: int
    waiting: list[Future[Room]] = field(default_factory=list)

    def is_wanted(self) -> bool:
        return any(not future.cancelled() for future in self.waiting)

    def __lt__(self, other: _Job) -> bool:
        return (len(self.constraint.spec), self.number) < (len(other.constraint.spec), other.number)


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
        self._queue: list[_Job] = []
        self._jobs: dict[bytes, _Job] = {}
        self._rooms: dict[bytes, Room] = {}
        """Oldest use first."""

        self._refused: dict[bytes, Ending] = {}
        self._closed = False
        self._keeper: _Keeper | None = None
        self._starting = threading.Lock()
        for number in range(compilers()):
            threading.Thread(target=self._compile, name=f"grammar-compiler-{number}", daemon=True).start()

    def warm_up(self) -> None:
        """Start the keeper now, in a thread; else the first constraint does."""
        threading.Thread(target=self._warm_up, name="grammar-keeper-start", daemon=True).start()

    def _warm_up(self) -> None:
        with suppress(ConstraintEnded):
            self._running_keeper()

    def compile(self, constraint: Constraint) -> Future[Room]:
        """A room for the constraint, for one request: see Room.leave. The future fails with ConstraintEnded. Cancelled
        by everybody who waits for it, the compiling is ended."""
        future: Future[Room] = Future()
        key = constraint.key
        with self._changed:
            if (ending := self._refused.get(key)) is not None:
                future.set_exception(ConstraintEnded(ending))
                return future
            room = self._rooms.pop(key, None)
            if room is not None and room.alive:
                self._rooms[key] = room
                room.users += 1
                future.set_result(room)
                return future
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(constraint, next(self._numbers))
                heapq.heappush(self._queue, job)
            job.waiting.append(future)
            self._changed.notify()
        return future

    def leave(self, room: Room) -> None:
        """One request less uses it."""
        with self._changed:
            room.users -= 1
            self._evict()

    def close(self) -> None:
        """End every process. Matchers answer no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for room in self._rooms.values():
                room.close()
            self._rooms.clear()
        with self._starting:
            if self._keeper is not None:
                self._keeper.end()

    def _compile(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = heapq.heappop(self._queue)
            result: Room | Ending | None = None
            try:
                result = self._room_of(job)
            except ConstraintEnded as error:
                result = error.ending
            except Exception:  # this thread must live; the request hears that it was not its fault
                logger.exception("compiling a constraint failed")
                result = Ending("could not be compiled: the server's log says why", "server")
            self._resolve(job, result)

    def _resolve(self, job: _Job, result: Room | Ending | None) -> None:
        key = job.constraint.key
        with self._changed:
            if result is None and job.is_wanted():  # given up, and then somebody else asked for the same
                heapq.heappush(self._queue, job)
                self._changed.notify()
                return
            self._jobs.pop(key, None)
            if isinstance(result, Room):
                self._rooms[key] = result
            elif isinstance(result, Ending) and result.is_clients:
                self._refused[key] = result
                while len(self._refused) > MOST_REFUSALS:
                    del self._refused[next(iter(self._refused))]
            for future in job.waiting:
                with suppress(InvalidStateError):
                    if isinstance(result, Room):
                        result.users += 1
                        try:
                            future.set_result(result)
                        except InvalidStateError:
                            result.users -= 1
                    elif result is not None:
                        future.set_exception(ConstraintEnded(result))
            self._evict()

    def _room_of(self, job: _Job) -> Room | Ending | None:
        """None: nobody wants it any more."""
        bounds = self.bounds
        if not job.is_wanted():
            return None
        keeper = self._running_keeper()
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = os.memfd_create("constraint")
        room = Room(self, own)
        try:
            os.write(text, job.constraint.spec.encode(errors="surrogatepass"))
            keeper.open(
                job.number,
                {"kind": job.constraint.kind, "any_whitespace": job.constraint.any_whitespace},
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
                return room
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
        keeper.close(job.number)
        return result

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
        for number, (key, room) in enumerate(idle):
            if room.alive and len(idle) - number <= MOST_ROOMS and size <= MOST_ROOM_BYTES:
                continue
            size -= room.bytes
            del self._rooms[key]
            room.close()


class _Keeper:
    """The process that forks rooms. Raises ConstraintEnded when it does not start."""

    def __init__(self, vocabulary: str, bounds: Bounds) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending = threading.Lock()
        memory = os.memfd_create("vocabulary")
        try:
            with os.fdopen(os.dup(memory), "wb") as file:
                file.write(vocabulary.encode())
            # A session of its own: an interrupt at the terminal is the engine's to act upon.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.actors.grammars.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # Where this process, which Ray may have started, has its packages from.
                env={**os.environ, **_THREADS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
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

    def close(self, number: int) -> None:
        with self._sending, suppress(OSError):
            send(self._control, {"do": "end", "room": number})

    def end(self) -> None:
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
            return
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Room:
    """A compiled constraint. users: requests that have it."""

    def __init__(self, host: GrammarHost, own: socket.socket) -> None:
        self._host, self._own = host, own
        self.users = 0
        self.bytes = 0
        self.alive = True
        self.close_later: Callable[[], None] = lambda: None

    def leave(self) -> None:
        self._host.leave(self)

    def matcher(self, stop_ids: Iterable[int]) -> Matcher:
        """Of one request. Its process starts with the first question."""
        return Matcher(self, self._host, sorted(stop_ids))

    def fork(self, stop_ids: Sequence[int], words: int, fds: Sequence[int]) -> None:
        """Raises OSError when the room is gone."""
        try:
            send(self._own, {"stop": list(stop_ids), "words": words}, fds)
        except OSError:
            self.alive = False
            raise

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self._own.close()
            self.close_later()


class Matcher:
    """One request's way through its grammar, in a process of its own. Not thread-safe; nothing here waits but `gather`.

    ending: why it answers no more, once it does not.
    """

    def __init__(self, room: Room, host: GrammarHost, stop_ids: Sequence[int]) -> None:
        self._room, self._host, self._stop_ids = room, host, stop_ids
        self._own: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._accepted: list[int] = []
        """Which the process has not been told of. It is, with the next question."""

        self._closed = False
        self.ending: Ending | None = None

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
        if self._own is not None:
            self._own.close()
        self._room.leave()

    def _ask(self, question: dict[str, Any]) -> None:
        if self.ending is not None:
            return
        try:
            own = self._own if self._own is not None else self._start()
            send(own, {"accept": self._accepted, **question})
            self._accepted = []
        except OSError:
            self._lost()

    def _start(self) -> socket.socket:
        """Raises OSError."""
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("masks")
        try:
            os.ftruncate(memory, self._host.most_rows * self._host.words * 4)
            self._memory = mmap.mmap(memory, 0)
            own.setblocking(False)
            self._room.fork(self._stop_ids, self._host.words, [theirs.fileno(), memory])
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
            bounds = self._host.bounds
            self.ending = Ending(
                "is too costly where this answer has got to: choosing among the next tokens took over "
                f"{bounds.mask_burst_s * 1000:g} ms of processor time, or {bounds.matcher_bytes >> 20} MiB",
                "step",
            )
        elif "refused" in answer:
            self.ending = Ending(f"does not allow token {answer['refused']}, which was chosen", "server")
        else:
            return answer
        return None

    def late(self) -> None:
        """It did not answer while a step could wait."""
        self.ending = Ending("took too long on a busy server; retry", "server")

    def _lost(self) -> None:
        self.ending = Ending("was lost with the process that had it; retry", "server")


def gather(matchers: Iterable[Matcher], seconds: float) -> dict[Matcher, dict[str, Any]]:
    """The answers to what each was asked last. Those without one so many seconds after the first have an ending then.
    Before the first there is PATIENCE times as long: where none answers, it is the machine that is slow, not one of
    them."""
    answers: dict[Matcher, dict[str, Any]] = {}
    outstanding = {matcher.fileno(): matcher for matcher in matchers if matcher.ending is None}
    poll = select.poll()
    for fd in outstanding:
        poll.register(fd, select.POLLIN)
    give_up = time.monotonic() + PATIENCE * seconds
    while outstanding:
        ready = poll.poll(max(0.0, give_up - time.monotonic()) * 1000)
        now = time.monotonic()
        for fd, _ in ready:
            matcher = outstanding.pop(fd)
            poll.unregister(fd)
            if (answer := matcher.take()) is not None:
                answers[matcher] = answer
        if ready:
            give_up = min(give_up, now + seconds)
        elif now >= give_up:
            for matcher in outstanding.values():
                matcher.late()
            break
    return answers
