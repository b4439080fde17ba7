"""Rounds of a target and its drafter in virtual time: nothing sleeps, and a seed decides the rest.

A drafter steps over all lines while the target verifies. A line goes on where every draft was accepted and the guess at
the target's own token was right; where it was wrong, an alternative may have been drafted, later. An answer leaves as
soon as k_miss drafts are there and holds what there is, up to k; the round waits for the slowest, up to its deadline,
and decodes plainly what has none. Requests end and others take their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.actors.round.length import Estimate, FixedLengths, LengthController, Lengths
from outrider.cluster.link.messages import DraftOrigin


@dataclass(frozen=True)
class Pair:
    """Times in seconds: of a step over one token (row), and of each further one."""

    target_s: tuple[float, float]
    draft_s: tuple[float, float]
    host_s: float = 0.0004
    """Added to every round: neither forward pass nor waiting."""

    answer_s: float = 0.0002
    """Added to a round that asked for drafts: there and back."""

    noise: float = 0.02
    deadline_s: float = 1.0

    def step_s(self, tokens: float) -> float:
        return self.target_s[0] + self.target_s[1] * (tokens - 1)

    def slower_drafter(self, factor: float) -> Pair:
        return replace(self, draft_s=(self.draft_s[0] * factor, self.draft_s[1] * factor))

    def plain_rate(self, batch: int) -> float:
        return batch / (self.step_s(batch) + self.host_s)


PAIRS = {
    "70b-8b": Pair((0.025, 0.00005), (0.006, 0.00003)),
    "32b-0.6b": Pair((0.0135, 0.00005), (0.0015, 0.00001)),
    "qwen-cpu": Pair((0.320, 0.005), (0.105, 0.005), host_s=0.005, answer_s=0.001, noise=0.05),
}


@dataclass(frozen=True)
class Text:
    """acceptance: of the drafter's likeliest token; several: of the batch's requests, in turn. others: share of misses
    that a drafted alternative covers."""

    acceptance: tuple[float, ...]
    others: float


TEXTS = {
    "stated": Text((0.8,), 0.5),
    "code": Text((0.66**0.25,), 0.5),
    "chat": Text((0.52**0.25,), 0.5),
    "poor": Text((0.3,), 0.3),
    "hopeless": Text((0.0,), 0.0),
}


class VirtualRounds:
    """A batch that stays full, under one controller."""

    def __init__(
        self, pair: Pair, text: Text, batch: int, controller: LengthController | FixedLengths, seed: int,
        max_tokens: int = 8, lifetime: int = 400,
    ) -> None:  # fmt: skip
        """lifetime: mean output tokens of a request."""
        self.pair, self.text, self.batch, self.controller = pair, text, batch, controller
        self.chosen: Sequence[Lengths] = []
        self._max_tokens, self._lifetime = max_tokens, lifetime
        self._random = np.random.default_rng(seed)
        self._load: tuple[int, float] | None = None
        self._drafts = np.zeros(batch, int)  # what the target verifies next
        self._wanted = np.zeros(batch, int)
        self._left = np.zeros(batch, int)
        self.estimates = [self._new(slot) for slot in range(batch)]

    @property
    def draft_step_s(self) -> float:
        return self.pair.draft_s[0] + self.pair.draft_s[1] * (self.batch - 1)

    def run(self, rounds: int) -> float:
        """Return the rate of these rounds, in tokens a second."""
        tokens, seconds = np.array([self.round() for _ in range(rounds)]).sum(axis=0)
        return float(tokens / seconds)

    def round(self) -> tuple[int, float]:
        """The target's step over what was proposed, the commit, the next choice, and the wait for drafts. Returns the
        tokens that were committed, and the seconds that it took."""
        pair, scheduled = self.pair, self.batch + int(self._drafts.sum())
        step_s = pair.step_s(scheduled) * np.exp(self._random.normal(0.0, pair.noise)) + pair.host_s
        if self._load is not None:
            self.controller.observe_step(*self._load)
        self._load = scheduled, step_s
        accepted, lines, origins = self._commit(int(step_s / self.draft_step_s + self._random.random()))
        self._renew(accepted + 1)
        self.chosen = self.controller.choose(self.estimates)
        self._wanted = np.array([min(lengths.k, self._max_tokens) for lengths in self.chosen])
        waited_s = self._wait(lines, origins)
        return self.batch + int(accepted.sum()), step_s + waited_s

    def _commit(self, draft_steps: int) -> tuple[np.ndarray, np.ndarray, list[DraftOrigin]]:
        """Return each request's accepted drafts, those that are ready for the next round, and where they come from."""
        rates = np.resize(np.array(self.text.acceptance), self.batch)
        right = self._random.random((self._max_tokens + 1, self.batch)) < rates
        run = np.cumprod(right, axis=0).sum(axis=0)
        accepted = np.minimum(run, self._drafts)
        for slot in np.flatnonzero(self._drafts):
            self.controller.observe_round(self.estimates[slot], int(self._drafts[slot]), int(accepted[slot]))
        # The first step drafts the guess at the target's own token; alternatives come after it.
        main = np.where((self._wanted > 0) & (run > self._drafts), draft_steps - 1, 0)
        covered = (self._wanted > 0) & (run <= self._drafts) & (self._random.random(self.batch) < self.text.others)
        side = np.where(covered, draft_steps - 2, 0)
        origins = [
            DraftOrigin.MAIN_LINE if by_guess > 0 else DraftOrigin.SIDE_BRANCH if by_other > 0 else DraftOrigin.MISS
            for by_guess, by_other in zip(main, side, strict=True)
        ]
        return accepted, np.maximum(np.maximum(main, side), 0), origins

    def _wait(self, ready: np.ndarray, origins: list[DraftOrigin]) -> float:
        """Tell the controller what came and when. Returns the seconds that the round waited."""
        self._drafts, waits = np.zeros(self.batch, int), []
        for slot, estimate in enumerate(self.estimates):
            if (wanted := int(self._wanted[slot])) == 0:
                continue
            needed, origin = min(self.chosen[slot].k_miss, wanted), origins[slot]
            wait_s = max(needed - int(ready[slot]), 0) * self.draft_step_s + self.pair.answer_s
            if wait_s > self.pair.deadline_s:
                wait_s, origin = self.pair.deadline_s, DraftOrigin.NONE
            else:
                self._drafts[slot] = min(max(int(ready[slot]), needed), wanted)
            waits.append(wait_s)
            self.controller.observe_answer(estimate, origin, int(self._drafts[slot]), self.draft_step_s, wait_s)
        return max(waits, default=0.0)

    def _renew(self, committed: np.ndarray) -> None:
        self._left -= committed
        for slot in np.flatnonzero(self._left <= 0):
            self.estimates[slot] = self._new(int(slot))

    def _new(self, slot: int) -> Estimate:
        self._left[slot] = self._random.integers(self._lifetime // 2, 3 * self._lifetime // 2)
        return self.controller.track(self._max_tokens)
