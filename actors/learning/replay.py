"""Keeps texts to train on, and held-out texts to compare versions on.

Training on the latest traffic alone forgets what came before, so half of a batch is a uniform sample of everything seen
so far (reservoir sampling, Vitter 1985), half of that general texts where there are some. Answers to some prompts are
held out: nothing is ever trained on them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from outrider.actors.learning.texts import Text

HELD_TEXTS = 96
"""The most held-out texts of each kind: comparing a version costs a forward pass over each."""

RECENT_TEXTS = PAST_TEXTS = 400
"""The latest texts, and the sample of all. A shift of domain was followed after 6,500 tokens (docs/learning.md), some
50 texts; one of 128 tokens takes 26 KB."""


class Reservoir:
    """Holds a number of texts, each of all that were ever added with the same chance."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.kept: list[Text] = []
        self._size, self._chance, self._seen = size, chance, 0

    def add(self, text: Text) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(text)
        elif (place := self._chance.randrange(self._seen)) < self._size:
            self.kept[place] = text


class Replay:
    """Draws training batches, and keeps held-out texts apart."""

    def __init__(self, held_out: float, general: Sequence[Text] = (), seed: int = 0) -> None:
        """held_out: share of the prompts. general: texts that stay, whatever comes."""
        self._chance, self._held_out, self._general = random.Random(seed), held_out, general
        self.num_held_out = 0  # that have ever come
        self.forget()

    def forget(self) -> None:
        """Drops all but the general texts, and what has been counted."""
        self._recent: deque[Text] = deque(maxlen=RECENT_TEXTS)
        self._past = Reservoir(PAST_TEXTS, self._chance)
        self._held_recent: deque[Text] = deque(maxlen=HELD_TEXTS)
        self._held_past = Reservoir(HELD_TEXTS, self._chance)

    def add(self, text: Text) -> bool:
        """Returns whether it is to train on; else it is held out."""
        is_held_out = text.prompt < self._held_out * 2**63
        self.num_held_out += is_held_out
        (self._held_recent if is_held_out else self._recent).append(text)
        (self._held_past if is_held_out else self._past).add(text)
        return not is_held_out

    @property
    def num_kept(self) -> int:
        """Returns how many different texts are kept to train on, without the general ones."""
        return len({*self._recent, *self._past.kept})

    def batch(self, size: int) -> list[Text]:
        """Draws a batch: half recent texts, a quarter general ones if there are any. Empty before the first text."""
        if not self._recent:
            return []
        num_general = size // 4 if self._general else 0
        shares = ((self._recent, size - size // 2), (self._general, num_general))
        chosen = [self._chance.choice(texts) for texts, count in shares for _ in range(count)]
        return chosen + [self._chance.choice(self._past.kept) for _ in range(size // 2 - num_general)]

    def held_recent(self, since: int = 0) -> list[Text]:
        """Returns the latest held-out texts; since: those that came when num_held_out was that or more."""
        return list(self._held_recent)[max(len(self._held_recent) - (self.num_held_out - since), 0) :]

    def held_past(self) -> list[Text]:
        """Returns a uniform sample of all held-out texts."""
        return list(self._held_past.kept)
