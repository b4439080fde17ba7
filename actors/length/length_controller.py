"""Chooses how many tokens each request drafts in the next round, from what the last ones measured.

The choice never sees a draft that is not verified yet, so it cannot bias what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.length.acceptance import Acceptance
from actors.length.allocation import Allocation, Batch, allocate
from actors.length.draft_wait import Answer, DraftWait, WaitCurves
from actors.length.limits import LengthLimits, Lengths
from actors.length.origin import Origin
from actors.length.outcomes import Outcomes
from actors.length.probing import Probing
from actors.length.step_cost import StepCost

_OFF = Lengths(0, 0)
_RARE_HITS = 0.2
"""Share of hits below which a probe waits for a token on a miss: it would see none otherwise."""


@dataclass(frozen=True, slots=True)
class _Reported:
    request_id: str
    origin: Origin
    num_tokens: int
    draft_step_s: float
    wait_s: float


class LengthController:
    """A round: `choose`, then its answers, its step and its verified drafts in any order, then `choose` again.

    Not thread-safe. Times are seconds, rates tokens a second.
    """

    def __init__(self, limits: LengthLimits) -> None:
        self._limits = limits
        self._max_tokens: dict[str, int] = {}
        self._acceptance = Acceptance(limits)
        self._outcomes = Outcomes(limits)
        self._probing = Probing(limits)
        self._step_cost = StepCost(limits.max_requests * (1 + limits.max_tokens), limits.step_memory)
        self._draft_cost = StepCost(limits.max_requests, limits.step_memory)
        self._wait = DraftWait(limits.max_tokens)
        self._reported: list[_Reported] = []
        self._answers = 0
        self._last_step_s = 0.0
        self._chosen: dict[str, Lengths] = {}
        self._chosen_before: dict[str, Lengths] = {}
        self._planned: dict[str, Lengths] = {}
        self._members: list[str] = []
        self._rounds_to_plan = 0
        self._speculating = True
        self._longest = limits.first_tokens
        self._allocation: Allocation | None = None
        self._histogram = [0] * (limits.max_tokens + 1)
        self._switches = 0

    def track(self, request_id: str, max_tokens: int) -> None:
        """A request that may have up to max_tokens drafts a round (of the deployment's, if that is fewer)."""
        self._max_tokens[request_id] = max(0, min(max_tokens, self._limits.max_tokens))
        for part in (self._acceptance, self._outcomes, self._probing):
            part.track(request_id)
        self._members = []  # plan anew

    def untrack(self, request_id: str) -> None:
        """Forget the request; what it taught about the deployment stays. Unknown ids are ignored."""
        self._max_tokens.pop(request_id, None)
        for part in (self._acceptance, self._outcomes, self._probing):
            part.untrack(request_id)
        for chosen in (self._chosen, self._chosen_before, self._planned):
            chosen.pop(request_id, None)
        self._reported = [answer for answer in self._reported if answer.request_id != request_id]
        if request_id in self._members:
            self._members = []

    def observe_round(self, request_id: str, drafted: int, accepted: int) -> None:
        """One request's verified round; accepted at most drafted."""
        self._acceptance.observe(request_id, drafted, accepted)

    def observe_step(self, num_requests: int, num_tokens: int, step_s: float) -> None:
        """A step without prefill: scheduled tokens of all requests, and the round's time less its wait for drafts."""
        uneven = self._limits.uniform_steps and num_tokens != num_requests * (1 + self._limits.max_tokens)
        self._step_cost.observe(num_requests, num_tokens, step_s, uneven)
        self._last_step_s = step_s

    def observe_answer(
        self, request_id: str, origin: Origin, num_tokens: int, draft_step_s: float, wait_s: float
    ) -> None:
        """The answer to the last choice, or its absence (NONE). num_tokens: drafts that came. draft_step_s: one batched
        draft step as the drafter reports it, 0 if it does not. wait_s: how long the round waited for it, or for all of
        the round's answers: only the longest of a round counts."""
        if self._chosen.get(request_id, _OFF).k:
            self._reported.append(_Reported(request_id, origin, num_tokens, draft_step_s, wait_s))

    def choose(self, request_ids: Sequence[str]) -> dict[str, Lengths]:
        """Lengths of every request of the next round. Those without a drafter get 0 and count for the load."""
        self._close_round()
        members = list(request_ids)
        if members != self._members or self._rounds_to_plan <= 0:
            self._plan(members)
        self._rounds_to_plan -= 1
        chosen = dict(self._planned)
        self._probe(chosen)
        self._chosen_before, self._chosen = self._chosen, chosen
        for lengths in chosen.values():
            self._histogram[lengths.k] += 1
        return {request_id: chosen.get(request_id, _OFF) for request_id in members}

    def snapshot(self) -> dict[str, Any]:
        """For metrics. Milliseconds; the step's cost around the present load."""
        num_requests = max(1, len(self._members))
        plain_s, doubled_s = self._step_cost.seconds(num_requests, np.array([1.0, 2.0]) * num_requests)
        per_token_s = (doubled_s - plain_s) / num_requests
        allocation = self._allocation
        return {
            "speculating": self._speculating,
            "switches": self._switches,
            "chosen_lengths": {str(k): count for k, count in enumerate(self._histogram) if count},
            "step_fixed_ms": float(plain_s - per_token_s * num_requests) * 1e3,
            "step_per_token_ms": float(per_token_s) * 1e3,
            "step_uneven_ms": self._step_cost.uneven_s * 1e3,
            "draft_step_ms": self._draft_step_s(num_requests) * 1e3,
            "origins": {origin.name.lower(): share for origin, share in self._outcomes.shares().items()},
            "acceptance_by_position": self._acceptance.by_position(),
            "probes": self._probing.probes,
            "expected_rate": allocation.rate if allocation is not None else 0.0,
            "expected_plain_rate": allocation.plain_rate if allocation is not None else 0.0,
        }

    def _close_round(self) -> None:
        """Learn from the last choice's answers."""
        answers = []
        step_times = [answer.draft_step_s for answer in self._reported if answer.draft_step_s > 0]
        if step_times:
            drafting = sum(lengths.k > 0 for lengths in self._chosen.values())
            self._draft_cost.observe(drafting, max(1, drafting), sum(step_times) / len(step_times))
        for answer in self._reported:
            lengths = self._chosen[answer.request_id]
            asked = lengths.k_miss if answer.origin is Origin.MISS else lengths.k
            was_drafting = self._chosen_before.get(answer.request_id, _OFF).k > 0
            self._outcomes.observe(answer.request_id, answer.origin, was_drafting, asked, answer.num_tokens)
            # No answer is waited for whether or not a miss would have been: it is not the tokens that take long.
            answers.append(Answer(answer.origin, lengths.k if answer.origin.is_hit else lengths.k_miss, answer.wait_s))
        if answers:
            self._wait.observe(answers, self._draft_step_s(len(answers)), self._last_step_s)
            self._answers += len(answers)
        self._reported = []

    def _plan(self, members: list[str]) -> None:
        self._members, self._rounds_to_plan = members, self._limits.plan_rounds
        drafting = [request_id for request_id in members if self._max_tokens.get(request_id)]
        if not drafting:
            self._planned = {}
            return
        if not (self._step_cost.observed and self._answers):
            first = self._limits.first_tokens
            lengths = ((i, min(first, self._max_tokens[i])) for i in drafting)
            self._planned = {request_id: Lengths(k, min(1, k)) for request_id, k in lengths}
            return
        allocation = self._allocation = allocate(self._batch(drafting, len(members)))
        speculating = bool(allocation.k.any())
        self._switches += speculating != self._speculating
        self._speculating = speculating
        pairs = zip(drafting, allocation.k.tolist(), allocation.k_miss.tolist(), strict=True)
        self._planned = {request_id: Lengths(k, k_miss) for request_id, k, k_miss in pairs}
        self._longest = int(allocation.k.max())

    def _batch(self, drafting: list[str], num_requests: int) -> Batch:
        survival = self._acceptance.survival(drafting)
        most = np.array([self._max_tokens[request_id] for request_id in drafting])
        # Few drafts get far, so what is known of depth is little: no plan goes more than twice as deep as the last.
        most = np.minimum(most, max(2, 2 * self._longest))
        survival[np.arange(self._limits.max_tokens) >= most[:, None]] = 0.0
        if self._speculating:
            # Who is switched off while others draft must promise a little more than they.
            off = np.array([self._planned.get(request_id) == _OFF for request_id in drafting])
            survival[off] *= 1.0 - self._limits.hysteresis
        return Batch(
            survival=survival,
            hit_rate=self._outcomes.hit_rates(drafting),
            delivery=self._outcomes.delivery(drafting),
            main_share=self._outcomes.main_line_share,
            num_plain=num_requests - len(drafting),
            step_s=lambda num_tokens: self._step_cost.seconds(num_requests, num_tokens),
            uniform_saving_s=self._step_cost.uneven_s,
            waits=self._curves(len(drafting)),
            least_gain=1.0 if self._speculating else 1.0 + self._limits.hysteresis,
        )

    def _probe(self, chosen: dict[str, Lengths]) -> None:
        """Put requests that are switched off on probe, in place."""
        if not chosen or not self._step_cost.observed:
            return
        off = [i for i, lengths in chosen.items() if not lengths.k or self._probing.is_on_probe(i)]
        on = [i for i, lengths in chosen.items() if lengths.k and not self._probing.is_on_probe(i)]
        begun = self._probing.advance(off, on, self._last_step_s, lambda count: self._probe_cost_s(count, on))
        if begun:
            self._acceptance.begin_probe(begun, nobody_drafts=not on)
        for request_id, rounds_left in self._probing.probed.items():
            # Its second half asks for one token: a bend in the step's cost may lie between one and more.
            k = self._limits.probe_tokens if 2 * rounds_left >= self._limits.probe_rounds else 1
            chosen[request_id] = Lengths(min(k, self._max_tokens[request_id]), self._probe_miss_tokens())
        if self._probing.ended:
            self._rounds_to_plan = 0

    def _probe_miss_tokens(self) -> int:
        return int(self._outcomes.shares()[Origin.MISS] > 1.0 - _RARE_HITS)

    def _probe_cost_s(self, count: int, on: list[str]) -> float:
        """What a round costs more with `count` requests on probe, if nothing of theirs is accepted."""
        num_requests, tokens = len(self._members), min(self._limits.probe_tokens, self._limits.max_tokens)
        load = num_requests + sum(self._planned[request_id].k for request_id in on)
        plain_s, probed_s = self._step_cost.seconds(num_requests, np.array([load, load + count * tokens]))
        longest = max((self._planned[request_id].k for request_id in on), default=0)
        curves = self._curves(count + len(on))
        wait_s = 0.0
        if longest < tokens:
            wait_s += float(curves.hit_s(tokens, self._outcomes.main_line_share, plain_s))
        return float(probed_s - plain_s) + wait_s + float(curves.miss_s[self._probe_miss_tokens()])

    def _draft_step_s(self, num_rows: int) -> float:
        return float(self._draft_cost.seconds(num_rows, float(max(1, num_rows))))

    def _curves(self, num_rows: int) -> WaitCurves:
        return self._wait.curves(self._draft_step_s(num_rows))
