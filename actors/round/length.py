"""How many tokens each request drafts in the next round, from three estimates of what the last ones measured. Pure.

- *Acceptance* by position: of a request, pulled towards that of all of its adapter where it has seen little.
- *Step cost*: a line over the tokens of the target's recent steps, and the drafter's step as it reports it.
- *Hits*: how often the right continuation was ready, how much of it came, and how long rounds waited.

The choice maximises expected tokens a second. It never sees a draft that is not verified yet, so it cannot bias what is
accepted. K: the most tokens drafted a request and round. Times are seconds, rates tokens a second.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.cluster.link.messages import DraftOrigin

logger = logging.getLogger(__name__)


class Lengths(NamedTuple):
    """Of one request in one round. k: tokens wanted on a hit, 0 for no drafting at all. k_miss: tokens worth waiting
    for on a miss, 0 to k."""

    k: int
    k_miss: int


_OFF, _FIRST = Lengths(0, 0), Lengths(2, 0)  # the latter until a step and an answer have been measured


@dataclass(slots=True, eq=False)
class Estimate:
    """Of one request. Made by `track`, held by the request, and nobody else's between two rounds.

    most: drafts it may have a round; 0: it decodes plainly, and is not looked at. accepted: [2, K], faded tries and
    successes at each position. alike: [2, K], those of all requests of its adapter, or of all without one; shared with
    them. chosen, before: for the round that runs, and for the one before it.
    """

    most: int = 0
    accepted: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    alike: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    chosen: Lengths = _OFF
    before: Lengths = _OFF
    planned: Lengths = _OFF

    def cut(self, k: int, k_miss: int) -> Lengths:
        return Lengths(min(k, self.most), min(k_miss, self.most))


class FixedLengths:
    """The same for every request in every round, as ``speculation.adaptive: false`` asks. Takes the place of a
    LengthController and learns nothing."""

    def __init__(self, num_tokens: int) -> None:
        self._lengths = Lengths(num_tokens, num_tokens)

    def track(self, max_tokens: int, adapter: str = "") -> Estimate:
        return Estimate(max_tokens)

    def observe_round(self, estimate: Estimate, drafted: int, accepted: int) -> None: ...

    def observe_step(self, num_requests: int, num_tokens: int, step_s: float) -> None: ...

    def observe_answer(
        self, estimate: Estimate, origin: DraftOrigin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None: ...

    def choose(self, estimates: Sequence[Estimate], trees: bool = False) -> list[Lengths]:
        return [self._lengths] * len(estimates)

    def snapshot(self) -> dict[str, Any]:
        return {}

    def rates(self) -> tuple[float, float]:
        """Nobody expects anything."""
        return 0.0, 0.0

    def token_price(self) -> float:
        """Every path is verified."""
        return 0.0

    def round_price(self) -> float:
        """Every round has paths."""
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
_START_GAIN, _STAY_GAIN = 1.04, 1.02  # what drafting must promise to begin again, and to go on
_WAIT_GAIN, _MANY = 1.03, 8  # what waiting on misses must promise; in a batch of more than so many it never does
_REQUEST_KEEP, _DEPLOYMENT_KEEP, _OFF_KEEP = 1 - 1 / 64, 1 - 1 / 500, 1 - 1 / 128
_STEP_KEEP, _WAIT_ROUNDS = 1 - 1 / 100, 32
_PRIOR_ACCEPTANCE, _PRIOR_TRIES, _LEVEL_TRIES, _POSITION_TRIES = 0.7, 8.0, 8.0, 16.0
_PRIOR_ELASTICITY = 0.1  # before it is known: a step of twice the tokens takes so much longer
_PROBE, _PROBED, _PROBE_ROUNDS, _PROBE_AFTER, _PROBE_AFTER_MAX = 2, 4, 4, 16, 512
# Plain rounds in a row, of which those after the first show a step beside which nobody drafts: after a few rounds with
# drafts, and again after many where the gain is small.
_HUSH_ROUNDS, _HUSH_FIRST, _HUSH_AFTER, _HUSH_GAIN = 3, 4, 128, 1.3
_PROBE_SHARE, _FIRST_PROBE_SHARE = 0.01, 0.04  # of the time: in the long run; at first, where they promise much
_MOST_ADAPTERS = 256  # whose acceptance is remembered


def _add(counts: np.ndarray, tried: int, won: int, keep: float) -> None:
    """counts [2, K]: faded tries and successes at each position, the first `tried` and `won` of which are counted."""
    counts *= keep
    counts[0, :tried] += 1.0
    counts[1, :won] += 1.0


def _rates(counts: np.ndarray, before: float) -> np.ndarray:
    """[K] A position that was seldom tried is taken to be like the one before it."""
    rates = []
    for tried, won in counts.T.tolist():
        before = (won + _PRIOR_TRIES * before) / (tried + _PRIOR_TRIES)
        rates.append(before)
    return np.array(rates)


class LengthController:
    """A round: `choose`, then its answers, its step and its verified drafts in any order, then `choose` again.

    Not thread-safe. Nothing it is told raises: what cannot be is cut to what can, or ignored.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # [2, K] each, as of an Estimate: accepted, by adapter; came on hits, and on misses that were waited for.
        self._accepted = {"": np.zeros((2, max_tokens))}
        self._came, self._came_late = (np.zeros((2, max_tokens)) for _ in range(2))
        # By whether trees are proposed, for which nothing is drafted ahead.
        hits = {DraftOrigin.MAIN_LINE: 5.0, DraftOrigin.SIDE_BRANCH: 1.8, DraftOrigin.MISS: 1.2}
        self._origins_of = {False: hits, True: dict.fromkeys(hits, 0.1) | {DraftOrigin.MISS: 7.8}}
        self._trees, self._tree_step_s = False, 0.0
        # Faded sums over steps of 1, then of w = 1 / seconds^2 times 1, tokens, tokens^2, seconds, tokens * seconds.
        self._steps = np.zeros(6)
        self._draft_step_s = self._last_step_s = self._off_s = self._probe_cost_s = 0.0
        self._late_s = {False: 0.0, True: 0.0}  # measured wait less the expected one, by whether a miss was waited for
        self._waits = {False: 0, True: 0}
        self._answered: list[tuple[DraftOrigin, float]] = []
        self._members: list[Estimate] = []  # of the round that runs
        self._rounds_left = self._probe_left = self._switches = self._probes = 0
        self._probe_after, self._speculating, self._probing = _PROBE_AFTER, True, False
        self._hush_left, self._until_hush = 0, _HUSH_FIRST
        self._plain_rounds = 0  # in a row
        self._quiet = 0.0, 0.0  # tokens and seconds of steps beside which nobody drafts
        self._rate = self._plain_rate = 0.0
        self._promise = 0.0  # what drafting would gain if drafts came at once
        self._histogram: Counter[int] = Counter()

    def track(self, max_tokens: int, adapter: str = "") -> Estimate:
        """Of a request that may have up to max_tokens drafts a round (of the deployment's, if that is fewer). adapter:
        what the target answers it with; the drafter has none, so that with each another share is accepted."""
        if adapter not in self._accepted and len(self._accepted) > _MOST_ADAPTERS:
            del self._accepted[next(name for name in self._accepted if name)]
        alike = self._accepted.setdefault(adapter, np.zeros((2, self._max_tokens)))
        return Estimate(max(0, min(max_tokens, self._max_tokens)), np.zeros((2, self._max_tokens)), alike)

    def observe_round(self, estimate: Estimate, drafted: int, accepted: int) -> None:
        """One request's verified round."""
        if estimate.most and drafted > 0:
            accepted = max(0, min(accepted, drafted))
            tried = min(drafted, accepted + 1)
            _add(estimate.accepted, tried, accepted, _REQUEST_KEEP)
            _add(estimate.alike, tried, accepted, _DEPLOYMENT_KEEP)

    def observe_step(self, num_requests: int, num_tokens: int, step_s: float) -> None:
        """A step without prefill: scheduled tokens of all requests, and the round's time less its wait for drafts."""
        if num_tokens < 1 or not 0 < step_s < math.inf:
            return
        fixed_s, per_token_s = self._line()
        if fixed_s + per_token_s > 0:  # one stall says little, a lasting change is believed after some twenty steps
            step_s = min(step_s, 2.0 * (fixed_s + per_token_s * num_tokens))
            if self._probing:
                self._probe_cost_s += max(0.0, step_s - fixed_s - per_token_s * num_requests)
        self._steps *= _STEP_KEEP
        w = 1.0 / step_s**2
        self._steps += (1.0, w, w * num_tokens, w * num_tokens**2, w * step_s, w * num_tokens * step_s)
        self._last_step_s = step_s
        if self._plain_rounds > 1:
            tokens, seconds = self._quiet
            weight = 0.3 if seconds else 1.0
            self._quiet = tokens + weight * (num_tokens - tokens), seconds + weight * (step_s - seconds)

    def observe_answer(
        self, estimate: Estimate, origin: DraftOrigin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None:
        """The answer to the last choice, or its absence (NONE). num_tokens: drafts that came. draft_step_s: one batched
        draft step as the drafter reports it, 0 if it does not. wait_s: how long the round waited for it, or for all of
        the round's answers: only the longest of a round counts."""
        wanted = estimate.chosen
        if not wanted.k or not 0 <= wait_s < math.inf:
            return
        if 0 < draft_step_s < math.inf:
            weight = 0.5 if self._probe_left else 0.1  # on probe what was before must not outweigh it
            self._draft_step_s += (draft_step_s - self._draft_step_s) * (weight if self._draft_step_s else 1.0)
            if self._trees:  # without the rows that are drafted ahead of a chain
                self._tree_step_s = min(self._draft_step_s, self._tree_step_s or math.inf)
        if origin.is_hit:
            _add(self._came, wanted.k, min(max(num_tokens, 0), wanted.k), _DEPLOYMENT_KEEP)
        elif wanted.k_miss:
            _add(self._came_late, wanted.k_miss, min(max(num_tokens, 0), wanted.k_miss), _DEPLOYMENT_KEEP)
        if estimate.before.k:  # else nobody had a reason to draft ahead
            for other in self._origins:
                self._origins[other] *= _DEPLOYMENT_KEEP
            self._origins[origin if origin.is_hit else DraftOrigin.MISS] += 1.0
        self._answered.append((origin, wait_s))

    def choose(self, estimates: Sequence[Estimate], trees: bool = False) -> list[Lengths]:
        """Returns the lengths of every request of the next round, in its order. Those without a drafter get 0 and count
        for the load.

        Args:
            trees: several paths are asked for. They are drafted when the outcome is known, so everybody waits.
        """
        self._close_round()
        if trees != self._trees:
            self._trees, self._rounds_left = trees, 0
        members, are_others = list(estimates), list(estimates) != self._members
        for left in set(self._members).difference(members) if are_others else ():
            left.chosen = left.before = _OFF
        self._members = members
        if are_others or self._rounds_left <= 0:
            # The first plans know little and hold for less.
            self._rounds_left = min(_PLAN_ROUNDS, 1 + sum(self._waits.values()) // 4)
            self._plan([estimate for estimate in members if estimate.most])
        self._rounds_left -= 1
        plain = self._hush(any(estimate.planned.k for estimate in members))
        for estimate in members:
            wanted = Lengths(estimate.planned.k, estimate.planned.k) if trees else estimate.planned
            estimate.before, estimate.chosen = estimate.chosen, _OFF if plain else wanted
        self._probing = False
        if members and not self._speculating:
            self._probe([estimate for estimate in members if estimate.most])
        self._plain_rounds = 0 if any(estimate.chosen.k for estimate in members) else self._plain_rounds + 1
        self._histogram.update(estimate.chosen.k for estimate in members if estimate.most)
        return [estimate.chosen for estimate in members]

    def snapshot(self) -> dict[str, Any]:
        """For metrics. Milliseconds; the step's cost is the line's."""
        fixed_s, per_token_s = self._line()
        total = sum(self._origins.values())
        return {
            "speculating": self._speculating,
            "switches": self._switches,
            "chosen_lengths": {str(k): count for k, count in sorted(self._histogram.items())},
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
        """Tokens a second that are expected of the batch, with drafts and without; 0 before its first round. Any
        thread."""
        return self._rate, self._plain_rate

    def token_price(self) -> float:
        """Returns the tokens that the batch makes in the time that one more scheduled token adds to a step."""
        return max(self._rate, self._plain_rate) * self._line()[1]

    def round_price(self) -> float:
        """Returns the tokens that a request makes in the time in which a round is drafted."""
        rate = max(self._rate, self._plain_rate) / max(len(self._members), 1)
        return (
            rate
            * (self._tree_step_s or self._draft_step_s)
            * max((estimate.chosen.k for estimate in self._members), default=0)
        )

    # What is known.

    def _line(self) -> tuple[float, float]:
        """A step's fixed seconds and those of a token: least squares of the relative errors, since what disturbs a step
        does so in proportion, and a small one is not to be read off a few large ones. Pulled towards the expected
        elasticity."""
        count, weight, tokens, squares, seconds, products = self._steps.tolist()
        if not weight:
            return 0.0, 0.0
        mean_tokens, mean_s = tokens / weight, seconds / weight
        prior = 0.1 * weight / count * mean_tokens**2  # what a tenth of a step twice as large would say
        spread = max(squares - tokens * mean_tokens, 0.0) + prior
        slope = (products - tokens * mean_s + prior * _PRIOR_ELASTICITY * mean_s / mean_tokens) / spread
        slope = min(max(slope, 0.0), mean_s / mean_tokens)
        return mean_s - slope * mean_tokens, slope

    def _plain_s(self, num_requests: int) -> float:
        """A step without drafts, nor a drafter at work beside it: where both share a memory that slows the target, and
        what is measured while drafting says too little for plain decoding. The line's shape, through what was seen."""
        fixed_s, per_token_s = self._line()
        tokens, seconds = self._quiet
        scale = seconds / (fixed_s + per_token_s * tokens) if seconds else 1.0
        return min(scale, 1.0) * (fixed_s + per_token_s * num_requests)

    def _survival(self, drafting: list[Estimate]) -> np.ndarray:
        """[requests, K] Probability that drafts 1..j are all accepted; 0 beyond what a request may have."""
        counts_of = {id(estimate.alike): estimate.alike for estimate in drafting}
        averages = {key: _rates(counts, _PRIOR_ACCEPTANCE) for key, counts in counts_of.items()}
        average = np.stack([averages[id(estimate.alike)] for estimate in drafting])
        tried, won = np.stack([estimate.accepted for estimate in drafting], axis=1)
        level = (won.sum(axis=1) - (tried * average).sum(axis=1)) / (tried.sum(axis=1) + _LEVEL_TRIES)
        expected = np.clip(average + level[:, None], 0.0, 0.995)
        survival = np.cumprod((won + _POSITION_TRIES * expected) / (tried + _POSITION_TRIES), axis=1)
        most = np.array([estimate.most for estimate in drafting])
        return survival * (np.arange(self._max_tokens) < most[:, None])

    def _wait_s(self, k_miss: int, missed: bool) -> float:
        """Of a round in which misses get k_miss tokens: a miss's are drafted while the target waits, a hit has had one
        of the target's steps for them. What was measured on top is added."""
        if missed:
            return max(0.0, k_miss * self._draft_step_s + self._late_s[True])
        ahead_s = max(0.0, (k_miss + 1) * self._draft_step_s - self._last_step_s) if k_miss else 0.0
        return max(0.0, ahead_s + self._late_s[False])

    def _close_round(self) -> None:
        """Learn how far the round's wait was from the expected one, and fade what is known of who drafts nothing."""
        if self._answered:
            k_miss = max((estimate.chosen.k_miss for estimate in self._members), default=0)
            missed = k_miss > 0 and any(not origin.is_hit for origin, _ in self._answered)
            waited_s = max(wait_s for _, wait_s in self._answered)
            self._waits[missed] += 1
            off_s = waited_s - self._wait_s(k_miss, missed)
            self._late_s[missed] += off_s / min(self._waits[missed] + 1, _WAIT_ROUNDS)
            if off_s > self._last_step_s:
                self._rounds_left = 0
            if self._probe_left:
                self._probe_cost_s += waited_s
                if waited_s > self._last_step_s:  # it has said enough
                    self._probe_left = 0
        self._answered = []
        if self._speculating:  # so that they are tried again now and then
            for estimate in self._members:
                if not estimate.chosen.k:
                    estimate.accepted *= _OFF_KEEP

    # What follows from it.

    def _plan(self, drafting: list[Estimate]) -> None:
        for estimate in drafting:
            estimate.planned = _OFF
        if not drafting:
            return
        if not (self._steps[0] and any(self._waits.values())):
            for estimate in drafting:
                estimate.planned = estimate.cut(*_FIRST)
            return
        fixed_s, per_token_s = self._line()
        num = len(self._members)
        self._plain_rate = num / self._plain_s(num)
        survival = self._survival(drafting)
        lengths, self._rate = self._best(survival)
        step_s = fixed_s + per_token_s * (num + survival.size)
        self._promise = (num + float(survival.sum())) / step_s / self._plain_rate - 1.0
        least = self._plain_rate * (_STAY_GAIN if self._speculating else _START_GAIN)
        speculating = bool(lengths.any() and self._rate > least)
        if speculating != self._speculating:
            self._speculating, self._off_s, self._probe_left = speculating, 0.0, 0
            rounds = 1 if self._draft_step_s > self._last_step_s else _PROBE_ROUNDS
            tokens = _PROBE * min(_PROBED, len(drafting))
            self._probe_cost_s = rounds * (self._draft_step_s + per_token_s * tokens)
            self._switches += 1
        elif speculating:
            self._probe_after = _PROBE_AFTER
        if speculating:
            for estimate, (k, k_miss) in zip(drafting, lengths.T.tolist(), strict=True):
                estimate.planned = Lengths(k, k_miss)

    def _best(self, survival: np.ndarray) -> tuple[np.ndarray, float]:
        """[2, requests] k and k_miss with the highest rate, and the rate.

        At the right price of a second the best drafts are those whose tokens are worth their time (Dinkelbach 1967),
        whichever misses are waited for; every k_miss is tried.
        """
        num_drafting, max_tokens = survival.shape
        num, (fixed_s, per_token_s), positions = len(self._members), self._line(), np.arange(max_tokens)
        came, late = (np.minimum.accumulate(_rates(counts, 1.0)) for counts in (self._came, self._came_late))
        hit_rate = 1.0 - self._miss_share()
        some_miss = 1.0 - hit_rate**num_drafting
        best, best_rate, best_value = np.zeros((2, num_drafting), int), 0.0, 0.0
        for k_miss in range(max_tokens + 1 if num_drafting <= _MANY or self._trees else 1):
            on_miss = (positions < k_miss) * late
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

    @property
    def _origins(self) -> dict[DraftOrigin, float]:
        return self._origins_of[self._trees]

    def _miss_share(self) -> float:
        return self._origins[DraftOrigin.MISS] / sum(self._origins.values())

    def _hush(self, drafting: bool) -> bool:
        """Whether this round is plain to see how long that takes, though drafts are planned."""
        if self._hush_left:
            self._hush_left -= 1
            self._rounds_left = min(self._rounds_left, self._hush_left)  # judge it after the last
            return True
        if not drafting or not self._steps[0]:
            return False
        self._until_hush -= 1
        if self._until_hush > 0 or (self._quiet[1] and self._rate > _HUSH_GAIN * self._plain_rate):
            return False
        self._until_hush, self._hush_left = _HUSH_AFTER, _HUSH_ROUNDS - 1
        return True

    def _probe(self, drafting: list[Estimate]) -> None:
        """While everything is off: now and then a few rounds of a few tokens, within a share of the time."""
        self._off_s += self._last_step_s
        if not self._probe_left:
            share = min(_PROBE_SHARE * _PROBE_AFTER_MAX / self._probe_after, _FIRST_PROBE_SHARE * self._promise)
            share = min(max(share, _PROBE_SHARE), _FIRST_PROBE_SHARE)
            if not drafting or self._off_s < max(self._probe_after * self._last_step_s, self._probe_cost_s / share):
                return
            self._probe_left, self._probe_cost_s, self._off_s = _PROBE_ROUNDS, 0.0, 0.0
            self._probe_after = min(2 * self._probe_after, _PROBE_AFTER_MAX)
            self._probes += min(_PROBED, len(drafting))
            self._doubt(drafting)
        self._probe_left, self._probing = self._probe_left - 1, True
        if not self._probe_left:
            self._rounds_left = 0  # judge it at once
        # Where hits are rare it would see no draft without waiting for one.
        on_miss = int(self._miss_share() > 0.8)
        for estimate in drafting[:_PROBED]:
            estimate.chosen = estimate.cut(_PROBE, on_miss)

    def _doubt(self, drafting: list[Estimate]) -> None:
        """Old evidence must not outweigh a probe: what was measured while everything stalled ends with the stall."""
        counts_of = [(counts, 12.0) for counts in self._accepted.values()]
        counts_of += [(self._came, 4.0), (self._came_late, 4.0)]
        counts_of += [(one.accepted, 2.0) for one in drafting]
        for counts, most in counts_of:
            counts *= min(1.0, most / max(float(counts[0, 0]), 1e-9))
        fade = min(1.0, 4.0 / sum(self._origins.values()))
        self._origins_of[self._trees] = {origin: count * fade for origin, count in self._origins.items()}
        self._waits = {missed: min(count, 1) for missed, count in self._waits.items()}
