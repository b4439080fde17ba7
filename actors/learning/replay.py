"""Texts that are kept to train on, and those that versions are compared on. Pure.

Training on the latest traffic alone forgets what came before, so half of a batch is a fair sample of everything seen
so far (reservoir sampling, Vitter 1985), and general texts where there are some. Of the answers to some
prompts nothing is ever trained on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_TEXTS = 96
"""Of each kind, at most: what comparing versions costs."""


class Reservoir(Generic[T]):
    """So many, each of all that were ever added with the same chance."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.kept: list[T] = []
        self._size, self._chance, self._seen = size, chance, 0

    def add(self, item: T) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(item)
        elif (place := self._chance.randrange(self._seen)) < self._size:
            self.kept[place] = item

    def clear(self) -> None:
        self.kept, self._seen = [], 0


class Replay(Generic[T]):
    def __init__(
        self,
        recent_tokens: int,
        past_tokens: int,
        text_tokens: int,
        held_out: float,
        seed: int = 0,
        general: Sequence[T] = (),
    ) -> None:
        """text_tokens: of a text, at most; what is kept of the past is counted in texts of so many. held_out: share of
        the prompts. general: texts that stay, whatever comes."""
        self._general = general
        self._chance = random.Random(seed)
        self._recent: deque[tuple[T, int]] = deque()
        self._recent_tokens, self._held_out = recent_tokens, held_out
        self._num_recent_tokens = 0
        self._past: Reservoir[T] = Reservoir(max(past_tokens // text_tokens, 1), self._chance)
        self._held_recent: deque[tuple[int, T]] = deque(maxlen=HELD_TEXTS)
        self._held_past: Reservoir[T] = Reservoir(HELD_TEXTS, self._chance)
        self.num_added = 0
        """To train on."""

        self.num_held_out = 0

    def add(self, text: T, num_tokens: int, prompt: int) -> None:
        """prompt: see lessons.Taught."""
        if prompt < self._held_out * 2**63:
            self._held_recent.append((self.num_held_out, text))
            self._held_past.add(text)
            self.num_held_out += 1
            return
        self.num_added += 1
        self._past.add(text)
        self._recent.append((text, num_tokens))
        self._num_recent_tokens += num_tokens
        while self._num_recent_tokens > self._recent_tokens and len(self._recent) > 1:
            self._num_recent_tokens -= self._recent.popleft()[1]

    @property
    def num_kept(self) -> int:
        """Different texts that are kept now to train on, but for the general ones."""
        return len({id(text) for text, _ in self._recent} | set(map(id, self._past.kept)))

    def forget(self) -> None:
        """All but the general texts, and what has been counted."""
        self._recent.clear()
        self._num_recent_tokens = 0
        self._held_recent.clear()
        for reservoir in (self._past, self._held_past):
            reservoir.clear()

    def batch(self, size: int) -> list[T]:
        """Half of them recent, a quarter general where there are such. Empty while nothing has come."""
        if not self._recent:
            return []
        recent: Sequence[tuple[T, int]] = self._recent
        chosen = [self._chance.choice(recent)[0] for _ in range((size + 1) // 2)]
        num_general = size // 4 if self._general else 0
        chosen += [self._chance.choice(self._general) for _ in range(num_general)]
        return chosen + [self._chance.choice(self._past.kept) for _ in range(size // 2 - num_general)]

    def held_recent(self, since: int = 0) -> list[T]:
        """The latest that are not trained on; since: of those that were added when num_held_out was that or more."""
        return [text for number, text in self._held_recent if number >= since]

    def held_past(self) -> list[T]:
        """A fair sample of all that are not trained on."""
        return list(self._held_past.kept)
