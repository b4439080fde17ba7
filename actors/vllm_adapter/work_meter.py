"""How much work a replica's engine does, and what a request of it is: what autoscaling goes by. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

WINDOW_S = 10.0
"""Over which tokens a second are counted."""

SHORTEST_S = 1.0
"""Of work without a break, before its rate says anything."""

HALF_LIFE_S = 300.0
"""Of work: by then a rate that was once reached counts half. A batch that is not full does less than the engine can."""

USUAL_PROMPT_TOKENS, USUAL_ANSWER_TOKENS = 256.0, 256.0
"""Of a request, while none has ended."""

_LATEST = 1 / 16
"""Weight of the request that ended last."""

_PART_S = 0.25


class WorkMeter:
    """`stepped` is called with each output of the engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._parts: deque[tuple[float, int]] = deque()
        """When one ended, and the tokens that came in it."""

        self._most = 0.0
        """Tokens a second."""

        self._looked_s = clock()
        self._prompt_tokens, self._answer_tokens = USUAL_PROMPT_TOKENS, USUAL_ANSWER_TOKENS

    def stepped(self, num_tokens: int, ended: Iterable[tuple[int, int]], busy: bool) -> None:
        """num_tokens: of prompts that were read and of answers. ended: prompt and answer tokens of each request that
        has ended with the step. busy: whether requests are left."""
        now = self._clock()
        for prompt, answer in ended:
            self._prompt_tokens += _LATEST * (prompt - self._prompt_tokens)
            self._answer_tokens += _LATEST * (answer - self._answer_tokens)
        if self._busy_since is None:
            self._looked_s = now
            self._busy_since = now  # what the first step of all did took a time that is not known
        elif self._parts and now - self._parts[-1][0] < _PART_S:
            self._parts[-1] = (self._parts[-1][0], self._parts[-1][1] + num_tokens)
        else:
            self._look(now)
            self._parts.append((now, num_tokens))
        if not busy:
            self._look(now)
            self._busy_since = None
            self._parts.clear()

    @property
    def tokens_per_s(self) -> float:
        """The most that was done lately; 0: nothing that could be measured was."""
        if self._busy_since is not None:
            self._look(self._clock())
        return self._most

    @property
    def request_tokens(self) -> float:
        """Prompt and answer of a usual request."""
        return self._prompt_tokens + self._answer_tokens

    def expected_tokens(self, prompt_tokens: int, max_tokens: int | None) -> float:
        """Of a request that has not begun."""
        answer = self._answer_tokens if max_tokens is None else min(max_tokens, self._answer_tokens)
        return prompt_tokens + answer

    def _look(self, now: float) -> None:
        assert self._busy_since is not None
        self._most *= 0.5 ** ((now - self._looked_s) / HALF_LIFE_S)
        self._looked_s = now
        while self._parts and self._parts[0][0] <= now - WINDOW_S:
            self._parts.popleft()
        span_s = min(WINDOW_S, now - self._busy_since)
        if span_s >= SHORTEST_S:
            self._most = max(self._most, sum(tokens for _, tokens in self._parts) / span_s)
