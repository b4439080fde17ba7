"""Rounds of a target and its drafter in virtual time: every step is an event, nothing sleeps, a seed decides the rest.

What is modelled, after `ModelSequence`, `StepPlanner` and `Verifier`: a drafter steps over main lines and side branches
while the target verifies; an answer leaves as soon as k_miss drafts are there and holds what there is, up to k; the
round waits for the slowest answer, up to its deadline, and decodes plainly what has none. Requests end and others take
their places. What is not: prefill, KV blocks, the network's own waits, and a drafter that knows where it is unsure.

Shapes: B requests, N text positions, S side branches of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numba
import numpy as np

from outrider.actors.round.length import Estimate, Lengths
from outrider.cluster.link.messages import DraftOrigin

MAX_ROWS, MAX_SIDES, LEAST_VALUE = 64, 8, 0.004
_MISS, _MAIN, _SIDE = int(DraftOrigin.MISS), int(DraftOrigin.MAIN_LINE), int(DraftOrigin.SIDE_BRANCH)


class Controller(Protocol):
    def track(self, max_tokens: int) -> Estimate: ...
    def observe_round(self, estimate: Estimate, drafted: int, accepted: int) -> None: ...
    def observe_step(self, num_requests: int, num_tokens: int, step_s: float) -> None: ...
    def observe_answer(
        self, estimate: Estimate, origin: DraftOrigin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None: ...
    def choose(self, estimates: Sequence[Estimate]) -> Sequence[Lengths]: ...


@dataclass(frozen=True)
class Pair:
    """Times in seconds: of a step over one token (row), and of each further one."""

    target_s: tuple[float, float]
    draft_s: tuple[float, float]
    host_s: float = 0.0004
    """Of every round: neither forward pass nor waiting."""

    answer_s: float = 0.0002
    """Of a round that asked for drafts: there and back."""

    noise: float = 0.02
    deadline_s: float = 1.0

    contention: float = 0.0
    """How much longer the target's steps take while a drafter is at work, as where both share a memory."""

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
    """acceptance: of the drafter's likeliest token; several: of the batch's requests, in turn. second, third: share of
    misses that an alternative covers."""

    acceptance: tuple[float, ...]
    second: float
    third: float

    def rates(self, batch: int, length: int, first: int = 0) -> np.ndarray:
        """[B, N]"""
        values = np.array(self.acceptance)
        return np.tile(values[(first + np.arange(batch)) % len(values)][:, None], (1, length))


TEXTS = {
    "stated": Text((0.8,), 0.735, 0.176),
    "code": Text((0.66**0.25,), 0.735, 0.176),
    "chat": Text((0.52**0.25,), 0.563, 0.229),
    "poor": Text((0.3,), 0.4, 0.15),
    "hopeless": Text((0.0,), 0.0, 0.0),
}


@dataclass
class Tally:
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class VirtualRounds:
    """A batch that stays full, under one controller."""

    def __init__(
        self, pair: Pair, text: Text, batch: int, controller: Controller, seed: int, rounds: int, max_tokens: int = 8,
        lifetime: int = 400,
    ) -> None:  # fmt: skip
        """rounds: most that will be run. lifetime: mean output tokens of a request."""
        self.pair, self.batch, self.max_tokens, self.controller = pair, batch, max_tokens, controller
        self._lifetime = lifetime
        self._noise = np.exp(np.random.default_rng(seed).normal(0.0, pair.noise, 4093))
        self._texts = np.random.default_rng(seed + 10_007)
        self._length = rounds * (max_tokens + 1) + 4 * max_tokens + 8
        self._slots = np.arange(batch)
        self.now = 0.0
        self.total = Tally()
        self.estimates: list[Estimate] = []
        self.chosen: Sequence[Lengths] = []
        self.write(text)
        shape = batch, MAX_SIDES + 2
        self._p = np.zeros(batch, int)  # next position to commit
        self._m = np.zeros(batch, int)  # end of the main line
        self._sent, self._wanted, self._need = (np.zeros(batch, int) for _ in range(3))
        self._due = np.zeros(batch, bool)
        self._side_at, self._side_rank, self._side_count = (np.zeros(shape, int) for _ in range(3))
        self._side_value = np.zeros(shape)
        self._in_flight = (np.zeros(batch, bool), np.zeros(shape, bool))
        self._step_ends = np.inf
        self._draft_step_s = 0.0
        self._drafts = np.zeros(batch, int)  # what the target verifies next
        self._ends = np.zeros(batch, int)
        self.estimates = [self._new(slot) for slot in range(batch)]
        self._load: tuple[int, int, float] | None = None

    def write(self, text: Text) -> None:
        """What is written from now on."""
        batch, length = self.batch, self._length
        self.text, first = text, int(self._texts.integers(len(text.acceptance)))
        draws = self._texts.random((2, batch, length))
        rates = text.rates(batch, length, first)
        right = draws[0] < rates
        wrong = np.where(right, length, np.arange(length))
        self._next_wrong = np.minimum.accumulate(wrong[:, ::-1], axis=1)[:, ::-1]
        # 1, 2: the alternative that covers a miss; 0: none does.
        rank = np.where(draws[1] < text.second, 1, np.where(draws[1] < text.second + text.third, 2, 0))
        self._rank = rank
        tables = {float(a): self._branch_table(float(a)) for a in np.unique(rates.mean(axis=1))}
        # [B, drafts sent, 3, S]
        self._branches = np.array([tables[float(a)] for a in rates.mean(axis=1)])

    def run(self, rounds: int) -> Tally:
        """Of these rounds."""
        before = Tally(self.total.tokens, self.now, self.total.rounds)
        for _ in range(rounds):
            self.round()
        return Tally(self.total.tokens - before.tokens, self.now - before.seconds, rounds)

    def round(self) -> None:
        """The target's step over what was proposed, the commit, the next choice, and the wait for drafts."""
        scheduled = self.batch + int(self._drafts.sum())
        step_s = self.pair.step_s(scheduled) * self._noise[self.total.rounds % len(self._noise)] + self.pair.host_s
        step_s *= 1.0 + self.pair.contention * bool(self._wanted.any())
        if self._load is not None:
            self.controller.observe_step(*self._load)
        self._load = self.batch, scheduled, step_s
        self.now += step_s
        self._advance(self.now, self.now, False, np.zeros(self.batch, int), np.zeros(self.batch))
        origins, counts, waits = self._commit()
        for slot, estimate in enumerate(self.estimates):
            if self._wanted[slot]:
                origin = DraftOrigin(int(origins[slot]))
                self.controller.observe_answer(
                    estimate, origin, int(counts[slot]), self._draft_step_s, float(waits[slot])
                )
        self._drafts = counts
        self.total.rounds += 1

    # The target's side.

    def _commit(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Origins, drafts that came and waits, [B] each, and the clock moved to where the round's wait ends."""
        slots, p, sent = self._slots, self._p, self._drafts
        accepted = np.minimum(sent, self._next_wrong[slots, p] - p)
        self.total.tokens += int(accepted.sum()) + self.batch
        for slot in np.flatnonzero(sent):
            self.controller.observe_round(self.estimates[slot], int(sent[slot]), int(accepted[slot]))
        at = p + accepted
        # A late answer's drafts were sent, never verified: the line goes on all the same where it is right.
        right_line = (accepted == sent) & self._right(at)
        main = right_line & (self._m > at)
        drawn = self._m > at
        side = (
            (self._side_at == at[:, None])
            & (self._side_rank == self._rank[slots, at][:, None])
            & (self._side_value > 0)
        )
        side &= (~main & drawn)[:, None] & (self._rank[slots, at] > 0)[:, None]
        has_side = side.any(axis=1)
        which = side.argmax(axis=1)
        self._p = p = at + 1
        side_end = p + self._side_count[slots, which]
        main_f, side_f = self._in_flight
        # What is in flight counts only where its line lives on.
        still = np.where(main, main_f, np.where(has_side, side_f[slots, which], False))
        self._m = np.where(main, self._m, np.where(has_side, side_end, p))
        # The guess itself is in flight: a step whose result is the token just committed is of no use.
        self._in_flight = still, np.zeros_like(side_f)
        self._renew()
        self._choose()
        ready = np.minimum(self._m - self._p, self._wanted)
        origins = np.where(main & (ready > 0), _MAIN, np.where(has_side & (ready > 0), _SIDE, _MISS))
        return self._wait(origins)

    def _right(self, at: np.ndarray) -> np.ndarray:
        return self._next_wrong[self._slots, at] != at

    def _choose(self) -> None:
        self.chosen = self.controller.choose(self.estimates)
        self._wanted = np.array([min(x.k, self.max_tokens) for x in self.chosen])
        self._need = np.minimum([x.k_miss for x in self.chosen], self._wanted)
        self._due = self._wanted > 0
        self._sent = np.zeros(self.batch, int)
        self._side_value[:] = 0.0

    def _wait(self, origins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        counts, waits, start = np.zeros(self.batch, int), np.zeros(self.batch), self.now
        if not self._due.any():
            self._advance(start, start, False, counts, waits)
            return origins, counts, waits
        deadline = start + self.pair.deadline_s
        self._advance(start, deadline, True, counts, waits)
        if self._due.any():
            waits[self._due], self.now = self.pair.deadline_s, deadline
            return np.where(self._due, int(DraftOrigin.NONE), origins), counts, waits
        waits += self.pair.answer_s
        self.now = start + float(waits.max())
        return origins, counts, waits

    def _advance(self, start: float, end: float, waiting: bool, counts: np.ndarray, waits: np.ndarray) -> None:
        """The drafter's steps from `start` up to `end`, or until nobody is due if waiting. counts, waits: what came
        and when, filled in."""
        self._step_ends, self._draft_step_s = _draft(
            start, end, waiting, self._step_ends, self._draft_step_s, *self.pair.draft_s,
            self._noise, self._p, self._m, self._sent, self._wanted, self._need, self._due, self._in_flight[0],
            self._side_at, self._side_rank, self._side_count, self._side_value, self._in_flight[1], self._branches,
            counts, waits,
        )  # fmt: skip

    def _renew(self) -> None:
        for slot in np.flatnonzero(self._p >= self._ends):
            self.estimates[slot] = self._new(int(slot))
            self._m[slot] = self._p[slot]
            self._in_flight[0][slot] = False

    def _new(self, slot: int) -> Estimate:
        # Positions go on: another request's text is as good as a new one.
        self._ends[slot] = self._p[slot] + self._texts.integers(self._lifetime // 2, 3 * self._lifetime // 2)
        return self.controller.track(self.max_tokens)

    def _branch_table(self, a: float) -> np.ndarray:
        """[drafts sent, 3, S] Offset, rank and value of the branches, those at the guess last. Value 0: none."""
        table = []
        for sent in range(self.max_tokens + 1):
            found = [
                (a**i * (1 - a) * share, i, r)
                for i in range(sent)
                for r, share in ((1, self.text.second), (2, self.text.third))
            ]
            found = sorted((c for c in found if c[0] >= LEAST_VALUE), reverse=True)[:MAX_SIDES]
            at_guess = [(a**sent * (1 - a) * s, sent, r) for r, s in ((1, self.text.second), (2, self.text.third))]
            found += [c for c in at_guess if c[0] >= LEAST_VALUE][: MAX_SIDES - len(found)]
            found += [(0.0, 0, 0)] * (MAX_SIDES + 2 - len(found))
            table.append(
                [[offset for _, offset, _ in found], [rank for *_, rank in found], [value for value, *_ in found]]
            )
        return np.array(table, dtype=float)


@numba.njit(cache=True)
def _draft(
    start, end, waiting, step_ends, mean_s, base_s, extra_s, noise, p, m, sent, wanted, need, due, main_f,
    side_at, side_rank, side_count, side_value, side_f, branches, counts, waits,
):  # fmt: skip
    """A drafter's steps, one after another. Arrays are changed in place; returns when the running step ends (inf: none
    does) and the mean of recent steps."""
    batch, num_sides = side_at.shape
    now, first, num_steps = start, True, 0
    while True:
        if not first:
            now = step_ends
            for b in range(batch):
                m[b] += main_f[b]
                main_f[b] = False
                for s in range(num_sides):
                    side_count[b, s] += side_f[b, s]
                    side_f[b, s] = False
            step_ends = np.inf
        # Answers.
        still_due = False
        for b in range(batch):
            if due[b] and m[b] - p[b] >= need[b]:
                sent[b] = counts[b] = min(m[b] - p[b], wanted[b])
                waits[b] = now - start
                due[b] = False
                for s in range(num_sides):
                    side_at[b, s] = p[b] + int(branches[b, sent[b], 0, s])
                    side_rank[b, s] = int(branches[b, sent[b], 1, s])
                    side_value[b, s] = branches[b, sent[b], 2, s]
                    side_count[b, s] = 0
            still_due |= due[b]
        # The next step: main lines, then side branches of what has been answered, the likeliest first.
        if step_ends == np.inf:
            rows = 0
            for b in range(batch):
                limit = p[b] + wanted[b] + (0 if due[b] else sent[b] + 1)
                main_f[b] = wanted[b] > 0 and m[b] < limit
                rows += main_f[b]
            candidates = 0
            for b in range(batch):
                for s in range(num_sides):
                    open_ = not due[b] and side_value[b, s] > 0.0 and side_at[b, s] < m[b]
                    side_f[b, s] = open_ and side_count[b, s] < wanted[b]
                    candidates += side_f[b, s]
            if rows + candidates > MAX_ROWS:
                room = max(MAX_ROWS - rows, 0)
                values = np.sort((side_value * side_f).ravel())[::-1]
                least = values[room]
                for b in range(batch):
                    for s in range(num_sides):
                        side_f[b, s] = side_f[b, s] and side_value[b, s] > least
            for b in range(batch):
                for s in range(num_sides):
                    rows += side_f[b, s]
            if rows:
                seconds = (base_s + extra_s * (rows - 1)) * noise[int(now * 1e6) % len(noise)]
                # As the drafter reports it.
                mean_s = mean_s + 0.02 * (seconds - mean_s) if mean_s > 0 else seconds
                step_ends = now + seconds
        first = False
        num_steps += 1
        if step_ends > end or (waiting and not still_due):
            return step_ends, mean_s
