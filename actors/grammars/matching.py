"""What a step asks of the grammars of its requests: matchers, each in a process of its own, that answer in time.

A step waits for the masks of all of its requests, which are made at the same time: a request whose masks use up
`Bounds.mask_burst_s` of processor time is ended by the kernel, alone. None gives way to the others: the step waits for
it, and where it waited for a core, so would they all. So one hostile grammar can hold a step up by mask_burst_s once, A
of them at the same time by A × mask_burst_s / cores; but all answers of one request by 2 × mask_burst_s (`Siblings`),
once: that constraint is refused to others that are to have several.
What has not answered after that was given no core, which is no fault of its request: it is waited for up to
`Bounds.step_wait_s` (and once more where drafts are checked before the masks).
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.actors.grammars.bounds import Allowance, Bounds, Ending
from outrider.actors.grammars.worker import SMALL_MESSAGE, receive, send
from outrider.cluster.cores import cores

if TYPE_CHECKING:
    from outrider.actors.grammars.host import GrammarHost
    from outrider.actors.grammars.rooms import Room


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
