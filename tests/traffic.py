"""Streams, one after the other, while something happens to the drafter. Each answer is known beforehand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from tests.reference import GREEDY, Choice, Coupled, Greedy
from tests.serving import HANG_GUARD_S, Deployment
from tests.stalls import Stalls

CHOICES: tuple[Choice, ...] = (GREEDY, Coupled(seed=31), Coupled(seed=32, temperature=0.7, top_p=0.95))
"""Taken in turn."""


@dataclass(frozen=True)
class OnlyOne(Greedy):
    """Drawn from p and q, by rejection or block verification; both leave one token, the likeliest."""

    verification: str

    def options(self) -> dict[str, Any]:
        return {"temperature": 1.5, "top_k": 1, "verification": self.verification}


EVERY_WAY = (*CHOICES, OnlyOne("rejection"), OnlyOne("block"))


@contextmanager
def running(threads: Sequence[threading.Thread], over: threading.Event) -> Iterator[None]:
    """Callers, until the block ends. over: what they look at between two requests."""
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
"""With a round's deadline it stays below the link's, of 5 s: a wait for that one shows."""

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
    """Between two messages that came at these times, but for what this process was held up meanwhile."""
    return max(later - earlier - stalls.within_s(earlier, later) for earlier, later in pairwise(times))


class Traffic:
    """Streams the same prompt over and over from entering to leaving the with block, which waits for the last one.

    Choices take turns. Every answer is checked against the reference on leaving.
    """

    def __init__(
        self, deployment: Deployment, prompt: Sequence[int], max_tokens: int, choices: Sequence[Choice] = CHOICES
    ) -> None:
        self._deployment, self._prompt, self._max_tokens = deployment, list(prompt), max_tokens
        self._choices = choices
        self.answers: list[list[int]] = []
        self.errors: list[Exception] = []
        self._times: list[list[float]] = []
        """Of each stream's messages."""

        self._stalls = Stalls()
        self.messages = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._stalls.__enter__()
        self._thread.start()
        self.wait_for_messages(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join(HANG_GUARD_S)
        self._stalls.__exit__(kind, error, at)
        if error is not None:
            return
        assert not self._thread.is_alive(), "the last stream never ended"
        assert not self.errors, f"a request failed: {self.errors[0]!r}"
        for number, answer in enumerate(self.answers):
            assert len(answer) == self._max_tokens
            choice = self._choices[number % len(self._choices)]
            self._deployment.reference.check(self._prompt, answer, label=f"stream {number}", choice=choice)

    def wait_for_messages(self, more: int) -> None:
        """Until so many more have arrived: the stream is under way."""
        wanted, give_up = self.messages + more, time.monotonic() + HANG_GUARD_S
        while self.messages < wanted and not self.errors:
            assert time.monotonic() < give_up, "the stream stands still"
            time.sleep(0.002)

    def longest_gap(self) -> float:
        """Between two messages of one stream: see longest_gap_s."""
        return max(longest_gap_s(times, self._stalls) for times in self._times if len(times) > 1)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                tokens: list[int] = []
                times: list[float] = []
                self._times.append(times)
                options = self._choices[len(self.answers) % len(self._choices)].options()
                with self._deployment.client.stream(
                    self._prompt, max_tokens=self._max_tokens, ignore_eos=True, **options
                ) as stream:
                    for message in stream:
                        times.append(time.monotonic())
                        tokens += message.token_ids
                        self.messages += 1
                self.answers.append(tokens)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.errors.append(error)
