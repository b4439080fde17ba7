"""Whether the drafter pauses instead of beginning a step that would still run when a target asks. Pure.

A target asks as soon as its verification ends. If that came out as nothing that is drafted for, it waits for the step
that runs, then for its own. How long a target verifies is known from its rounds, so the time at which it will ask is,
too; and a step that is begun late in a round brings little of what it drafts ahead, since it is cut off by the commit.
One target's rounds hold a whole number of steps then, the first of which begins as it asks. Where many share the
drafter, a pause for one is at the cost of all, and hardly ever worth it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.actors.drafter.model_sequence import ModelSequence

_PRICE = 2.0
"""What a target's time is worth beside the tokens that a step would bring."""

_LATEST = 0.9
"""Of a step: a pause is no longer."""

_SPREAD = 0.1
"""Of a step: where a target's rounds differ by more, nobody knows when it will ask; and so long it is waited for beyond
what they differ by."""

_FADE = 0.1


@dataclass(eq=False, slots=True)
class Pause:
    """Work: nothing, until a target asks."""

    is_step: ClassVar[bool] = False
    link_id: int
    until: float
    clock: Callable[[], float]
    over: threading.Event = field(default_factory=threading.Event)

    def execute(self) -> None:
        self.over.wait(max(self.until - self.clock(), 0.0))


class Mean:
    """That forgets."""

    def __init__(self) -> None:
        self.value, self.is_known = 0.0, False

    def add(self, value: float) -> None:
        self.value += (value - self.value) * (_FADE if self.is_known else 1.0)
        self.is_known = True


@dataclass(eq=False)
class Rounds:
    """Of one link. verify_s: from the last answer to the next commit; missed: of rounds, those that waited for a
    step. answered_at: None since the target asked, or where it did not ask when it was expected to."""

    verify_s: Mean = field(default_factory=Mean)
    spread_s: Mean = field(default_factory=Mean)
    missed: Mean = field(default_factory=Mean)
    answered_at: float | None = None

    @property
    def asks_at(self) -> float | None:
        if self.answered_at is None or not self.spread_s.is_known:
            return None
        return self.answered_at + self.verify_s.value


class Pauses:
    """Of one drafter, whose loop guards it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[int, Rounds] = {}
        self._worth = Mean()
        """Of a step that is all ahead, in tokens."""

        self._now: Pause | None = None

    def answered(self, link_id: int) -> None:
        self._links.setdefault(link_id, Rounds()).answered_at = self._clock()

    def asked(self, link_id: int) -> None:
        """Of each of a round's commits: what the first says is how long the target verified."""
        rounds = self._links.setdefault(link_id, Rounds())
        if rounds.answered_at is not None:
            took_s = self._clock() - rounds.answered_at
            if rounds.verify_s.is_known:
                rounds.spread_s.add(abs(took_s - rounds.verify_s.value))
            rounds.verify_s.add(took_s)
            rounds.answered_at = None
        self.end()

    def looked(self, link_id: int, missed: bool) -> None:
        """missed: what is at hand is not all that it asks for."""
        self._links[link_id].missed.add(missed)

    def unlink(self, link_id: int) -> None:
        self._links.pop(link_id, None)
        self.end()

    def stepped(self, worth: float) -> None:
        """A step that is all ahead has been planned."""
        self._worth.add(worth)

    def end(self) -> None:
        if self._now is not None:
            self._now.over.set()

    def next(self, step_s: float, sequences: Iterable[ModelSequence]) -> Pause | None:
        """Instead of a step ahead, which would take step_s. sequences: all of them."""
        now = self._clock()
        expected = [
            (at, link_id)
            for link_id, rounds in self._links.items()
            if (at := rounds.asks_at) is not None and now < at + rounds.spread_s.value
        ]
        if not expected or not self._worth.is_known:
            return None
        asks_at, link_id = min(expected)
        rounds = self._links[link_id]
        left_s, spread_s = asks_at - now, rounds.spread_s.value
        if left_s >= _LATEST * step_s or spread_s > _SPREAD * step_s:
            return None
        pace = sum(sequence.tokens_per_s for sequence in sequences if sequence.key[0] == link_id)
        brought = rounds.missed.value * (step_s - left_s) * pace
        if brought * _PRICE < left_s / step_s * self._worth.value:
            return None
        self._now = Pause(link_id, asks_at + 2 * spread_s + _SPREAD * step_s, self._clock)
        return self._now

    def complete(self, pause: Pause) -> None:
        self._now = None
        if not pause.over.is_set() and (rounds := self._links.get(pause.link_id)) is not None:
            rounds.answered_at = None
