"""What a drafter collects to learn from: parts of answers, with what the target thought of each token. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.cluster.link.messages import Lesson

_IDENTITY_TOKENS = 512
"""The last tokens of a prompt stand for the prompt: the first ones are the same wherever a system prompt is."""

_MOST_WAITING_TOKENS = 200_000
"""Of all parts that nobody has fetched."""

_LEAST_LIKELIEST = -20.0
"""The likeliest token of a vocabulary is likelier, so this was no distribution."""


@dataclass(frozen=True, eq=False)
class Taught:
    """A part of an answer, and what stands before it.

    ids: int32 [N]. start: the first token that was taught. top_ids: int32 [N - start, W], top_log_p: float16, likewise:
    the target's likeliest tokens in the places from start on. greedy: the answer's tokens are the likeliest ones.
    prompt: 63 bits, the same for all parts of an answer, and for all answers to one prompt.
    """

    ids: np.ndarray
    start: int
    top_ids: np.ndarray
    top_log_p: np.ndarray
    greedy: bool
    prompt: int


@dataclass
class _Part:
    """In the making."""

    start: int
    end: int
    ids: list[np.ndarray] = field(default_factory=list)
    log_p: list[np.ndarray] = field(default_factory=list)


class LessonBook:
    def __init__(self, max_text_tokens: int) -> None:
        from outrider.cluster.learning_config import TAUGHT_AT_ONCE  # a drafter that learns nothing needs no pydantic

        self._taught_at_once = TAUGHT_AT_ONCE
        self._max_text_tokens = max_text_tokens
        self._parts: dict[Hashable, _Part] = {}
        self._prompts: dict[Hashable, int] = {}
        """Of every sequence that has been taught something."""

        self._done: deque[Taught] = deque()
        self._waiting = 0
        self.dropped = 0
        """Parts that nobody has fetched in time."""

    def add(self, key: Hashable, text: Sequence[int], lesson: Lesson, greedy: bool) -> None:
        """text: of the sequence, all that was committed. A lesson that does not follow the last one begins a part."""
        start, end = lesson.position, lesson.position + len(lesson.ids)
        if not 1 <= start <= end <= len(text) or lesson.log_p[:, 0].min() < _LEAST_LIKELIEST:
            return
        if key not in self._prompts:
            self._prompts[key] = _identity(text[max(0, start - _IDENTITY_TOKENS) : start])
        part = self._parts.get(key)
        if part is not None and (part.end != start or part.ids[0].shape[1] != lesson.ids.shape[1]):
            self._finish(key, text, greedy)
            part = None
        if part is None:
            part = self._parts[key] = _Part(start, start)
        part.end = end
        part.ids.append(lesson.ids)
        part.log_p.append(lesson.log_p)
        if part.end - part.start >= self._taught_at_once:
            self._finish(key, text, greedy)

    def close(self, key: Hashable, text: Sequence[int], greedy: bool) -> None:
        """Nothing more of this text follows."""
        self._finish(key, text, greedy)
        self._prompts.pop(key, None)

    def _finish(self, key: Hashable, text: Sequence[int], greedy: bool) -> None:
        """A part is as long as it gets."""
        part = self._parts.pop(key, None)
        if part is None:
            return
        end = min(part.end, part.start + self._max_text_tokens - 1)
        first = max(0, end - self._max_text_tokens)
        taught = end - part.start
        self._done.append(
            Taught(
                np.array(text[first:end], np.int32),
                part.start - first,
                np.concatenate(part.ids)[:taught],
                np.concatenate(part.log_p)[:taught],
                greedy,
                self._prompts[key],
            )
        )
        self._waiting += end - first
        while self._waiting > _MOST_WAITING_TOKENS:
            self._waiting -= len(self._done.popleft().ids)
            self.dropped += 1

    def take(self) -> list[Taught]:
        """What is complete, once."""
        done = list(self._done)
        self._done.clear()
        self._waiting = 0
        return done


def _identity(token_ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(np.array(token_ids, np.int32).tobytes(), digest_size=8).digest()) >> 1
