"""Chooses how many drafts each request gets in the next round, from what the last rounds have measured.

Three estimates decide:

- *acceptance* by position: a request's own, pulled towards that of its acceptance group;
- *cost of a step*: a line over the tokens of the target's recent steps, and the drafter's step as it reports it;
- *hits*: how often the right continuation had been drafted ahead, how much of it came, and how long rounds waited.

The controller maximises expected tokens per second. It never sees a draft that is not verified yet, so it cannot bias
what is accepted. K is the most drafts of a request in a round. Times are in seconds, rates in tokens per second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.cluster.link.messages import DraftOrigin

logger = logging.getLogger(__name__)


class Lengths(NamedTuple):
    """Holds the lengths of one request in one round.

    k: drafts wanted on a hit; 0: no drafts at all. k_miss: drafts that are worth waiting for on a miss, 0 to k.
    """

    k: int
    k_miss: int


_OFF, _FIRST = Lengths(0, 0), Lengths(2, 0)
"""No drafts, and the lengths until a step and an answer have been measured."""


@dataclass(slots=True, eq=False)
class Estimate:
    """Holds what is known of one request's drafts. `track` makes it, and the request keeps it.

    max_drafts: in a round; with 0 it decodes plainly. accepted: [2, K], tries and successes at each position, with
    exponential decay. group_accepted: [2, K], those of all requests of its group, which share the array. planned: the
    lengths of the present plan. chosen, previous: its lengths in the round that runs, and in the one before it.
    """

    max_drafts: int = 0
    accepted: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    group_accepted: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    planned: Lengths = _OFF
    chosen: Lengths = _OFF
    previous: Lengths = _OFF

    def cut(self, k: int, k_miss: int) -> Lengths:
        """Returns these lengths, or the most that the request may have."""
        return Lengths(min(k, self.max_drafts), min(k_miss, self.max_drafts))


class FixedLengths:
    """Gives every request the same lengths, as ``speculation.adaptive: false`` asks, in place of a LengthController."""

    def __init__(self, num_tokens: int) -> None:
        self._lengths = Lengths(num_tokens, num_tokens)

    def track(self, max_tokens: int, group: str = "") -> Estimate:
        return Estimate(max_tokens)

    def observe_round(self, estimate: Estimate, drafted: int, accepted: int) -> None: ...

    def observe_step(self, num_tokens: int, step_s: float) -> None: ...

    def observe_answer(
        self, estimate: Estimate, origin: DraftOrigin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None: ...

    def choose(self, estimates: Sequence[Estimate], trees: bool = False) -> list[Lengths]:
        return [self._lengths] * len(estimates)

    def snapshot(self) -> dict[str, Any]:
        return {}

    def rates(self) -> tuple[float, float]:
        """Returns zeros, since no rate is expected."""
        return 0.0, 0.0

    def token_price(self) -> float:
        """Returns 0, so that every path is verified."""
        return 0.0

    def round_price(self) -> float:
        """Returns 0, so that every round has paths."""
        return 0.0


class SafeLengths:
    """Calls a length controller, and drafts nothing any more once it has raised, so that the engine goes on."""

    def __init__(self, controller: LengthController | FixedLengths) -> None:
        self._controller = controller
        self.failures = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return getattr(self._controller, name)(*args)
            except Exception:
                logger.exception("the length controller failed: no more drafts until this replica is restarted")
                self.failures += 1
                self._controller = FixedLengths(0)
                return getattr(self._controller, name)(*args)

        return call


_PLAN_ROUNDS = 8
"""Rounds that a plan holds for."""

_START_GAIN, _STAY_GAIN = 1.04, 1.02
"""The speedup that drafting must promise to begin again, and to go on."""

_WAIT_GAIN, _MANY = 1.03, 8
"""The speedup that waiting on misses must promise, and the number of requests above which no round waits for them."""

_REQUEST_KEEP, _DEPLOYMENT_KEEP, _OFF_KEEP, _STEP_KEEP = 1 - 1 / 64, 1 - 1 / 500, 1 - 1 / 128, 1 - 1 / 100
_WAIT_ROUNDS = 32
"""Rounds over which the wait is averaged."""

_PRIOR_ACCEPTANCE, _PRIOR_TRIES, _LEVEL_TRIES, _POSITION_TRIES = 0.7, 8.0, 8.0, 16.0
_PRIOR_ELASTICITY = 0.1
"""By how much longer a step of twice the tokens takes, before it has been measured."""

_PROBE, _PROBED, _PROBE_ROUNDS = 2, 4, 4
"""A probe's drafts, its requests and its rounds."""

_FIRST_PROBE_SHARE, _PROBE_SHARE = 0.04, 0.02
"""The share of the time that probes may take, at first and in the long run."""

_PROBE_AFTER, _PROBE_AFTER_MAX = 16, 512
"""Rounds before the first probe, and most rounds between two of them."""

_PROBE_TRIES = 4.0
"""Weight of what was known before a probe."""

_MAX_GROUPS = 256
"""Groups whose acceptance is remembered."""


def _add(counts: np.ndarray, tried: int, won: int, keep: float) -> None:
    """Fades counts, [2, K] tries and successes, and counts the first `tried` and the first `won` positions."""
    counts *= keep
    counts[0, :tried] += 1.0
    counts[1, :won] += 1.0


def _rates(counts: np.ndarray, before: float) -> np.ndarray:
    """Returns the success rate of each position, [K]. One that was seldom tried is like the one before it."""
    rates = []
    for tried, won in counts.T.tolist():
        before = (won + _PRIOR_TRIES * before) / (tried + _PRIOR_TRIES)
        rates.append(before)
    return np.array(rates)


class LengthController:
    """Chooses lengths by the rate that is expected of them. Not thread-safe.

    A round is `choose`, then its answers, its step and its verified drafts in any order.
    """

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: K."""
        self._max_tokens = max_tokens
        self._accepted = {"": np.zeros((2, max_tokens))}
        """By group, as in Estimate."""

        self._came = np.zeros((2, max_tokens))
        """Drafts wanted and drafts that came, by position, on hits."""

        self._origins = {DraftOrigin.MAIN_LINE: 5.0, DraftOrigin.SIDE_BRANCH: 1.8, DraftOrigin.MISS: 1.2}
        """Answers by origin, faded, of chains."""

        self._trees = False
        self._tree_step_s = 0.0
        """A step of the drafter for a tree, without the rows that are drafted ahead of a chain."""

        self._steps = np.zeros(6)
        """Faded sums over steps: of 1, then of w = 1 / s^2 times 1, n, n^2, s and n s, for n tokens in s seconds."""

        self._draft_step_s = self._last_step_s = 0.0
        self._late_s = {False: 0.0, True: 0.0}
        """By how much rounds waited for longer than was expected, by whether they waited for a miss."""

        self._num_waits = 0
        """Rounds with answers."""

        self._answered: list[tuple[DraftOrigin, float]] = []
        """Origin and wait of the round's answers."""

        self._members: list[Estimate] = []
        """The requests of the round that runs."""

        self._rounds_left = 0
        """Rounds until the next plan."""

        self._speculating, self._switches, self._probes = True, 0, 0
        self._probe_left, self._probe_after = 0, _PROBE_AFTER
        self._probing = False  # whether the round that runs is one of a probe
        self._off_s = self._probe_cost_s = 0.0
        """Time since the last probe, and what that one has cost."""

        self._rate = self._plain_rate = 0.0

    def track(self, max_tokens: int, group: str = "") -> Estimate:
        """Returns the estimate of a new request that may have max_tokens drafts in a round, and at most K.

        group: names the requests with similar acceptance, see `acceptance_group`.
        """
        if group not in self._accepted and len(self._accepted) > _MAX_GROUPS:
            del self._accepted[next(name for name in self._accepted if name)]
        group_accepted = self._accepted.setdefault(group, np.zeros((2, self._max_tokens)))
        return Estimate(max(0, min(max_tokens, self._max_tokens)), np.zeros((2, self._max_tokens)), group_accepted)

    def observe_round(self, estimate: Estimate, drafted: int, accepted: int) -> None:
        """Takes in how many of a request's drafts a round has accepted."""
        if estimate.max_drafts:
            tried = min(drafted, accepted + 1)
            _add(estimate.accepted, tried, accepted, _REQUEST_KEEP)
            _add(estimate.group_accepted, tried, accepted, _DEPLOYMENT_KEEP)

    def observe_step(self, num_tokens: int, step_s: float) -> None:
        """Takes in a step without prefill: its scheduled tokens, and its time less the wait for drafts."""
        if num_tokens < 1 or step_s <= 0:
            return
        fixed_s, per_token_s = self._line()
        if fixed_s + per_token_s > 0:  # one stall says little, a lasting change is believed after some twenty steps
            step_s = min(step_s, 2.0 * (fixed_s + per_token_s * num_tokens))
        self._steps *= _STEP_KEEP
        w = 1.0 / step_s**2
        self._steps += (1.0, w, w * num_tokens, w * num_tokens**2, w * step_s, w * num_tokens * step_s)
        self._last_step_s = step_s

    def observe_answer(
        self, estimate: Estimate, origin: DraftOrigin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None:
        """Takes in the answer to the last choice, or that there was none.

        Args:
            origin: NONE without an answer.
            num_tokens: drafts that came.
            draft_step_s: one batched step of the drafter as it reports it, 0 if it does not.
            wait_s: of the round for this answer, or for all of them: the longest counts.
        """
        wanted = estimate.chosen
        if not wanted.k:
            return
        if draft_step_s > 0:
            weight = 0.5 if self._probing else 0.1  # what was before a probe must not outweigh it
            self._draft_step_s += (draft_step_s - self._draft_step_s) * (weight if self._draft_step_s else 1.0)
            if self._trees:
                self._tree_step_s = min(self._draft_step_s, self._tree_step_s or self._draft_step_s)
        if origin.is_hit:
            _add(self._came, wanted.k, min(num_tokens, wanted.k), _DEPLOYMENT_KEEP)
        if estimate.previous.k and not self._trees:  # else the drafter had no reason to draft ahead
            for other in self._origins:
                self._origins[other] *= _DEPLOYMENT_KEEP
            self._origins[origin if origin.is_hit else DraftOrigin.MISS] += 1.0
        self._answered.append((origin, wait_s))

    def choose(self, estimates: Sequence[Estimate], trees: bool = False) -> list[Lengths]:
        """Returns the lengths of each request of the next round. Requests without a drafter get 0 and count as load.

        Args:
            trees: several paths are asked for. They are drafted when the outcome is known, so every request waits.
        """
        self._close_round()
        self._probing = False
        members = list(estimates)
        is_new = trees != self._trees or members != self._members
        for left in set(self._members).difference(members) if is_new else ():
            left.chosen = left.previous = _OFF
        self._trees, self._members = trees, members
        drafting = [estimate for estimate in members if estimate.max_drafts]
        if is_new or self._rounds_left <= 0:
            self._rounds_left = min(_PLAN_ROUNDS, 1 + self._num_waits // 4)  # the first plans know little
            self._plan(drafting)
        self._rounds_left -= 1
        for estimate in members:
            estimate.previous, estimate.chosen = estimate.chosen, estimate.planned
        if drafting and not self._speculating:
            self._probe(drafting)
        return [estimate.chosen for estimate in members]

    def snapshot(self) -> dict[str, Any]:
        """Returns the state for metrics, times in milliseconds."""
        fixed_s, per_token_s = self._line()
        total = sum(self._origins.values())
        return {
            "speculating": self._speculating,
            "switches": self._switches,
            "step_fixed_ms": fixed_s * 1e3,
            "step_per_token_ms": per_token_s * 1e3,
            "draft_step_ms": self._draft_step_s * 1e3,
            "origins": {origin.name.lower(): count / total for origin, count in self._origins.items()},
            "acceptance_by_position": _rates(np.sum(list(self._accepted.values()), axis=0), _PRIOR_ACCEPTANCE).tolist(),
            "probes": self._probes,
            "expected_rate": self._rate,
            "expected_plain_rate": self._plain_rate,
        }

    def rates(self) -> tuple[float, float]:
        """Returns the batch's expected rates with drafts and without, 0 before its first round. Any thread."""
        return self._rate, self._plain_rate

    def token_price(self) -> float:
        """Returns the tokens that the batch makes in the time that one more scheduled token adds to a step."""
        return max(self._rate, self._plain_rate) * self._line()[1]

    def round_price(self) -> float:
        """Returns the tokens that a request makes in the time by which drafting after the outcome prolongs a round.

        A chain's round takes as long where one of its requests misses and the others wait.
        """
        num = len(self._members)
        all_hit = (1.0 - self._chain_miss_share()) ** num if num <= _MANY else 1.0
        rate = max(self._rate, self._plain_rate) / max(num, 1)
        num_steps = max((estimate.chosen.k for estimate in self._members), default=0)
        return rate * num_steps * (self._tree_step_s or self._draft_step_s) * all_hit

    # What is known.

    def _line(self) -> tuple[float, float]:
        """Returns the fixed seconds of a step and those of each token.

        It is the least squares of relative errors, since what disturbs a step does so in proportion to it, pulled
        towards the expected elasticity.
        """
        count, weight, tokens, squares, seconds, products = self._steps.tolist()
        if not weight:
            return 0.0, 0.0
        mean_tokens, mean_s = tokens / weight, seconds / weight
        prior = 0.1 * weight / count * mean_tokens**2  # a tenth of a step with twice the tokens and 1.1 times the time
        spread = max(squares - tokens * mean_tokens, 0.0) + prior
        slope = (products - tokens * mean_s + prior * _PRIOR_ELASTICITY * mean_s / mean_tokens) / spread
        slope = min(max(slope, 0.0), mean_s / mean_tokens)
        return mean_s - slope * mean_tokens, slope

    def _survival(self, drafting: list[Estimate]) -> np.ndarray:
        """Returns the probability that drafts 1 to j are all accepted, [requests, K]; 0 beyond its max_drafts."""
        averages = {id(each.group_accepted): _rates(each.group_accepted, _PRIOR_ACCEPTANCE) for each in drafting}
        average = np.stack([averages[id(estimate.group_accepted)] for estimate in drafting])
        tried, won = np.stack([estimate.accepted for estimate in drafting], axis=1)
        level = (won.sum(axis=1) - (tried * average).sum(axis=1)) / (tried.sum(axis=1) + _LEVEL_TRIES)
        expected = np.clip(average + level[:, None], 0.0, 0.995)
        survival = np.cumprod((won + _POSITION_TRIES * expected) / (tried + _POSITION_TRIES), axis=1)
        max_drafts = np.array([estimate.max_drafts for estimate in drafting])
        return survival * (np.arange(self._max_tokens) < max_drafts[:, None])

    def _miss_share(self) -> float:
        return 1.0 if self._trees else self._chain_miss_share()

    def _chain_miss_share(self) -> float:
        return self._origins[DraftOrigin.MISS] / sum(self._origins.values())

    def _wait_s(self, k_miss: int, missed: bool) -> float:
        """Returns the expected wait of a round in which misses get k_miss drafts.

        The drafter answers once k_miss drafts are there, on a hit too. A miss's are drafted while the target waits; a
        hit's, and the next token that they follow, during the target's step.
        """
        expected_s = k_miss * self._draft_step_s
        if not missed and k_miss:
            expected_s = max(0.0, expected_s + self._draft_step_s - self._last_step_s)
        return max(0.0, expected_s + self._late_s[missed])

    def _close_round(self) -> None:
        """Learns how far the round's wait was from the expected one, and fades what is known of plain requests."""
        if self._answered:
            k_miss = max((estimate.chosen.k_miss for estimate in self._members), default=0)
            missed = k_miss > 0 and any(not origin.is_hit for origin, _ in self._answered)
            waited_s = max(wait_s for _, wait_s in self._answered)
            self._num_waits += 1
            off_s = waited_s - self._wait_s(k_miss, missed)
            self._late_s[missed] += off_s / min(self._num_waits + 1, _WAIT_ROUNDS)
            if off_s > self._last_step_s:
                self._rounds_left = 0
            if self._probing:
                num_drafts = sum(estimate.chosen.k for estimate in self._members)
                self._probe_cost_s += waited_s + num_drafts * self._line()[1]
                if waited_s > self._last_step_s:  # it has said enough
                    self._probe_left = 0
        self._answered = []
        if self._speculating:  # so that they are tried again now and then
            for estimate in self._members:
                if not estimate.chosen.k:
                    estimate.accepted *= _OFF_KEEP

    # What follows from it.

    def _plan(self, drafting: list[Estimate]) -> None:
        """Plans the lengths of the next rounds, and decides whether drafts are worth it at all."""
        is_known = bool(self._steps[0] and self._num_waits)
        for estimate in drafting:
            estimate.planned = _OFF if is_known else estimate.cut(*_FIRST)
        if not drafting or not is_known:
            return
        fixed_s, per_token_s = self._line()
        self._plain_rate = len(self._members) / (fixed_s + per_token_s * len(self._members))
        lengths, self._rate = self._best(self._survival(drafting))
        least = self._plain_rate * (_STAY_GAIN if self._speculating else _START_GAIN)
        speculating = bool(lengths.any() and self._rate > least)
        if speculating != self._speculating:
            self._speculating, self._off_s, self._probe_left = speculating, 0.0, 0
            self._probe_cost_s = self._draft_step_s + per_token_s * _PROBE * min(_PROBED, len(drafting))
            self._switches += 1
        if speculating:
            self._probe_after = _PROBE_AFTER
            for estimate, (k, k_miss) in zip(drafting, lengths.T.tolist(), strict=True):
                estimate.planned = Lengths(k, k_miss)

    def _best(self, survival: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns the k and k_miss of each request, [2, requests], that have the highest rate, and the rate.

        At the right price of a second the best drafts are those whose tokens are worth their time (Dinkelbach 1967),
        whichever misses are waited for; every k_miss is tried.
        """
        num_drafting, max_tokens = survival.shape
        num, (fixed_s, per_token_s), positions = len(self._members), self._line(), np.arange(max_tokens)
        came = np.minimum.accumulate(_rates(self._came, 1.0))
        hit_rate = 1.0 - self._miss_share()
        some_miss = 1.0 - hit_rate**num_drafting
        best, best_rate, best_value = np.zeros((2, num_drafting), int), 0.0, 0.0
        for k_miss in range(max_tokens + 1 if num_drafting <= _MANY or self._trees else 1):
            on_miss = positions < k_miss
            comes = np.maximum(came, on_miss) * hit_rate + on_miss * (1.0 - hit_rate)
            missed = some_miss * (k_miss > 0)
            wait_s = missed * self._wait_s(k_miss, True) + (1.0 - missed) * self._wait_s(k_miss, False)
            rate = self._plain_rate
            for _ in range(3):
                taken = (survival > rate * per_token_s) * comes
                step_s = fixed_s + per_token_s * (num + float(taken.sum()))
                rate = (num + float((taken * survival).sum())) / max(step_s + wait_s, 1e-9)
            # A plain round has a use of its own that this does not see: the drafter gets ahead.
            value = rate / (_WAIT_GAIN if k_miss else 1.0)
            if value > best_value and taken.any():
                k = (taken > 0).sum(axis=1)
                best, best_rate, best_value = np.array([k, np.minimum(k, k_miss)]), rate, value
        return best, best_rate

    def _probe(self, drafting: list[Estimate]) -> None:
        """Gives some requests a few drafts now and then while all others decode plainly."""
        self._off_s += self._last_step_s
        if not self._probe_left:
            share = max(_FIRST_PROBE_SHARE * _PROBE_AFTER / self._probe_after, _PROBE_SHARE)
            if self._off_s < max(self._probe_after * self._last_step_s, self._probe_cost_s / share):
                return
            self._probe_left, self._probe_cost_s, self._off_s = _PROBE_ROUNDS, 0.0, 0.0
            self._probe_after = min(2 * self._probe_after, _PROBE_AFTER_MAX)
            self._probes += min(_PROBED, len(drafting))
            self._doubt(drafting)
        self._probing = True
        self._probe_left -= 1
        if not self._probe_left:
            self._rounds_left = 0  # so that the next round's plan takes it in
        # Where hits are rare no draft would come without waiting for one.
        on_miss = int(self._miss_share() > 0.8)
        for estimate in drafting[:_PROBED]:
            estimate.chosen = estimate.cut(_PROBE, on_miss)

    def _doubt(self, drafting: list[Estimate]) -> None:
        """Lets a probe outweigh what was known before: what was measured in a stall ends with it."""
        for counts in (*self._accepted.values(), self._came, *(estimate.accepted for estimate in drafting)):
            counts *= min(1.0, _PROBE_TRIES / max(float(counts[0, 0]), 1e-9))
        fade = min(1.0, _PROBE_TRIES / sum(self._origins.values()))
        self._origins = {origin: count * fade for origin, count in self._origins.items()}
        self._num_waits = min(self._num_waits, 1)
