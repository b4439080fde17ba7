"""Streams, one after the other, while something happens to the drafter. Each answer is known beforehand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from tests.support.cluster.serving import HANG_GUARD_S, Deployment
from tests.support.load.stalls import Stalls
from tests.support.load.streams import Stream
from tests.support.models.reference import GREEDY, Choice, Coupled, Greedy

CHOICES: tuple[Choice, ...] = (GREEDY, Coupled(seed=31), Coupled(seed=32, temperature=0.7, top_p=0.95))
"""Choices that streams take in turn."""


@dataclass(frozen=True)
class OnlyOne(Greedy):
    """Drawn from p and q, by rejection or block verification; both leave one token, the likeliest."""

    verification: str

    def options(self) -> dict[str, Any]:
        return {"temperature": 1.5, "top_k": 1, "verification": self.verification}


EVERY_WAY = (*CHOICES, OnlyOne("rejection"), OnlyOne("block"))


@contextmanager
def running(threads: Sequence[threading.Thread], over: threading.Event) -> Iterator[None]:
    """Run callers until the block ends. over: an event that they look at between two requests."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(HANG_GUARD_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"


LEAST_ALLOWANCE_S = 3.0
"""Seconds. Added to a round's deadline it stays below the link's, of 5 s: a wait for that one shows."""

PAUSE_S = 0.1
"""Seconds after an error before the caller asks again."""

QUIET_GAPS = 10
QUIET_STREAMS = 3


def allowance_s(deployment: Deployment, prompt: Sequence[int]) -> float:
    """How much longer than a round's deadline a gap may be on this machine: target step, proxy, client and everybody
    else on it. By the longest gap of streams that nothing happens to."""
    quiet = 0.0
    with Stalls() as stalls:
        for _ in range(QUIET_STREAMS):
            with deployment.client.stream(list(prompt), max_tokens=100, ignore_eos=True, **GREEDY.options()) as stream:
                quiet = max(quiet, longest_gap_s([time.monotonic() for _ in stream], stalls))
    return max(LEAST_ALLOWANCE_S, QUIET_GAPS * quiet)


def longest_gap_s(times: Sequence[float], stalls: Stalls) -> float:
    """Return the longest time between two messages, without the time for which this process was held up."""
    return max(later - earlier - stalls.within_s(earlier, later) for earlier, later in pairwise(times))


class Traffic:
    """Callers that ask one stream after the other, from entering to leaving the with block, which waits for the last.

    Choices take turns. Every answer is checked against the reference on leaving; an error fails the test.

    Args:
        prompt: of every stream, or a function of the caller's number and the stream's.
        goes_on: callers go on after an error, and errors are left to the test.
    """

    def __init__(
        self,
        deployment: Deployment,
        prompt: Sequence[int] | Callable[[int, int], list[int]],
        max_tokens: int,
        choices: Sequence[Choice] = CHOICES,
        *,
        callers: int = 1,
        goes_on: bool = False,
    ) -> None:
        self._deployment, self._max_tokens, self._goes_on = deployment, max_tokens, goes_on
        self._prompt_of = prompt if callable(prompt) else lambda _caller, _number: list(prompt)
        self._choices = choices
        self._streams: list[tuple[Choice, Stream]] = []
        self.answers: list[Stream] = []
        """Streams that have come to their end."""

        self.errors: list[Exception] = []
        self._stalls = Stalls()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in range(callers)]

    def __enter__(self) -> Self:
        self._stalls.__enter__()
        for thread in self._threads:
            thread.start()
        self.wait_for_messages(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(HANG_GUARD_S)
        self._stalls.__exit__(kind, error, at)
        if error is not None:
            return
        assert not any(thread.is_alive() for thread in self._threads), "the last stream never ended"
        assert self._goes_on or not self.errors, f"a request failed: {self.errors[0]!r}"
        for choice, stream in self._streams:
            assert stream.error is not None or len(stream.tokens) == self._max_tokens
            self._deployment.reference.check(stream.prompt, stream.tokens, label=f"{choice}", choice=choice)

    @property
    def messages(self) -> int:
        return sum(len(stream.came_s) for _, stream in list(self._streams))

    def wait_for_messages(self, more: int) -> None:
        """Wait until so many more have arrived: streams are under way."""
        self._wait(lambda: self.messages, more, "the streams stand still")

    def wait_for_answers(self, more: int) -> None:
        self._wait(lambda: len(self.answers), more, "no answer ends")

    def longest_gap(self) -> float:
        """Return the longest time between two messages of one stream: see longest_gap_s."""
        return max(longest_gap_s(each.came_s, self._stalls) for _, each in self._streams if len(each.came_s) > 1)

    def _wait(self, count: Callable[[], int], more: int, problem: str) -> None:
        wanted, give_up = count() + more, time.monotonic() + HANG_GUARD_S
        while count() < wanted and (self._goes_on or not self.errors):
            assert time.monotonic() < give_up, problem
            time.sleep(0.002)

    def _run(self, caller: int) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                choice = self._choices[number % len(self._choices)]
                prompt = self._prompt_of(caller, number)
                stream = Stream(prompt, self._max_tokens, options=choice.options())
                self._streams.append((choice, stream))
                stream.read(self._deployment.client)
                number += 1
                if stream.error is None:
                    self.answers.append(stream)
                    continue
                self.errors.append(stream.error)
                if not self._goes_on:
                    return
                self._stopping.wait(PAUSE_S)
        except Exception as error:
            self.errors.append(error)
            raise
