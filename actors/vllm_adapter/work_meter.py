"""Measures an engine's throughput and the size of its requests, for autoscaling."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

WINDOW_S = 10.0
"""The window over which throughput is measured."""

SHORTEST_S = 1.0
"""The shortest uninterrupted work whose throughput counts."""

HALF_LIFE_S = 300.0
"""Working time after which a throughput that was reached counts half. It decays slowly, because a batch that is not
full does less than the engine can."""

USUAL_PROMPT_TOKENS, USUAL_ANSWER_TOKENS = 256.0, 256.0
"""The assumed size of a request, until one has ended."""

_LATEST = 1 / 16
"""The weight of the latest request in the average size."""


class WorkMeter:
    """Measures throughput and request sizes. Call `stepped` with each output of the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._steps: deque[tuple[float, int]] = deque()
        """The end of each step in the window, and its tokens."""

        self._most = 0.0
        """The highest throughput, decayed, in tokens per second."""

        self._looked_s = clock()
        self._prompt_tokens, self._answer_tokens = USUAL_PROMPT_TOKENS, USUAL_ANSWER_TOKENS

    def stepped(self, num_tokens: int, ended: Iterable[tuple[int, int]], busy: bool) -> None:
        """Notes a step.

        num_tokens: tokens of prompts that were computed and of answers. ended: prompt and answer tokens of each request
        that ended with the step. busy: whether requests are left.
        """
        now = self._clock()
        for prompt, answer in ended:
            self._prompt_tokens += _LATEST * (prompt - self._prompt_tokens)
            self._answer_tokens += _LATEST * (answer - self._answer_tokens)
        if self._busy_since is None:
            self._looked_s = now
            self._busy_since = now  # when this step began is not known, so its tokens do not count
        else:
            self._look(now)
            self._steps.append((now, num_tokens))
        if not busy:
            self._look(now)
            self._busy_since = None
            self._steps.clear()

    @property
    def tokens_per_s(self) -> float:
        """Returns the highest recent throughput, 0 before the first measurement."""
        if self._busy_since is not None:
            self._look(self._clock())
        return self._most

    @property
    def request_tokens(self) -> float:
        """Returns the average tokens of a request, prompt and answer."""
        return self._prompt_tokens + self._answer_tokens

    def expected_tokens(self, prompt_tokens: int, max_tokens: int | None) -> float:
        """Returns the tokens that a request without any output is expected to have."""
        answer = self._answer_tokens if max_tokens is None else min(max_tokens, self._answer_tokens)
        return prompt_tokens + answer

    def _look(self, now: float) -> None:
        """Updates the highest throughput."""
        assert self._busy_since is not None
        self._most *= 0.5 ** ((now - self._looked_s) / HALF_LIFE_S)
        self._looked_s = now
        while self._steps and self._steps[0][0] <= now - WINDOW_S:
            self._steps.popleft()
        span_s = min(WINDOW_S, now - self._busy_since)
        if span_s >= SHORTEST_S:
            self._most = max(self._most, sum(tokens for _, tokens in self._steps) / span_s)
