"""Which of several drafters earns most: measured acceptance and step times, for each round and for each request. Pure.

Two choices. A look-up's drafts or a model's, for every round (`choose`): tokens a second are (1 + expected drafts
accepted) / (a round's seconds + what the model still has to draft). And of several models the one that drafts for a
request (`lead`), some rounds at a time, since the others have to read the text that it is to go on from: a round takes
as long as the target verifies, and longer where its outcome was not foreseen, by so many of the model's steps as that
costs on average.

Both hang on counts, and on what came before the round's tokens, never on which tokens a model drew: rejection stays
exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MODEL = "draft_model"
"""The drafter's own model; others have the names that the configuration gives them."""

_FIRST_GUESS = 0.5
_KEEP_ALL, _KEEP_OWN, _KEEP_LEAD = 0.995, 0.8, 0.97
"""Of what was counted, at each verdict: over all requests, of a request's own for the choice of a round, and for that
of its model. A text enters and leaves what it repeats within a few rounds."""

_PRIOR_DRAFTS, _PRIOR_LEAD = 2.0, 8.0
"""Drafts that the others' rate counts for in a request's own; likewise for the choice of its model."""

_TRY_AFTER, _TRY_AFTER_MOST = 24, 384
"""Rounds without a verdict on a model after which it drafts, whatever it is expected to earn: twice as many each time,
until it is chosen for itself."""

_STINT, _TRIAL = 4, 4
"""Rounds that a model drafts for a request before others may take its place, unless there is news of one; and those of
a model that is tried."""

_BETTER, _ERRORS = 1.05, 0.5
"""Times what the model earns that drafts now: to take its place, even if its rate is so many standard errors lower than
counted, and the other's as many higher."""

_FIRST_WAIT_STEPS, _PRIOR_ROUNDS = 2.0, 4.0
"""That a round waits for where its outcome was not foreseen, until it has been measured in more than so many."""


class Rate:
    """A fading mean. Of drafts: those that were right, of those looked at, up to the first wrong one of a round."""

    def __init__(self, keep: float) -> None:
        self._keep, self.right, self.looked_at = keep, 0.0, 0.0

    def add(self, right: float, looked_at: float) -> None:
        if looked_at:
            self.right = self.right * self._keep + right
            self.looked_at = self.looked_at * self._keep + looked_at

    def given(self, prior: float, weight: float) -> float:
        return (self.right + weight * prior) / (self.looked_at + weight)

    def halve(self) -> None:
        self.right, self.looked_at = self.right / 2, self.looked_at / 2


@dataclass(frozen=True)
class Offer:
    """num_drafts: that would be sent. wait_s: until they are there."""

    drafter: str
    num_drafts: int
    wait_s: float = 0.0


@dataclass
class Standing:
    """Of one model in one request. since: rounds since a verdict on it."""

    rate: Rate = field(default_factory=lambda: Rate(_KEEP_LEAD))
    since: int = 0
    try_after: int = _TRY_AFTER
    """Look-ups' drafts having been chosen that often."""


@dataclass
class Record:
    """Of one request: how its drafters have done. Made by `Judge.record`."""

    rates: dict[str, Rate]
    models: dict[str, Standing]
    best: str | None = None
    """The model that was chosen last for what it earns."""

    leader: str | None = None
    """The model that drafts: that one, or another that is tried."""

    rounds_left: int = 0
    """Until models are compared again."""


class Judge:
    def __init__(self, drafters: Sequence[str], models: Sequence[str] = (MODEL,)) -> None:
        """drafters: all of them; models: those among them that are no look-ups."""
        self._all = {name: Rate(_KEEP_ALL) for name in drafters}
        self._models = tuple(models)
        self._try_after = dict.fromkeys(models, _TRY_AFTER)
        """Another model having led that often."""

        self._round_s = Rate(0.9)
        self._wait_steps = Rate(0.99)
        self.together = self.record()
        """For requests that all have the same model: what is counted of each is all that is known of them."""

        self.chosen = dict.fromkeys(drafters, 0)
        self.judged, self.right = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)

    def record(self) -> Record:
        rates = {name: Rate(_KEEP_OWN) for name in self._all}
        return Record(rates, {name: Standing() for name in self._models})

    def verdict(self, record: Record, drafter: str, right: int, looked_at: int) -> None:
        if drafter in record.models and looked_at:
            record.models[drafter].since = self.together.models[drafter].since = 0
            record.models[drafter].rate.add(right, looked_at)
        self._all[drafter].add(right, looked_at)
        record.rates[drafter].add(right, looked_at)
        self.right[drafter] += right
        self.judged[drafter] += looked_at

    def changed(self, drafter: str, records: Iterable[Record]) -> None:
        """Another version of it drafts from now on: what was counted of it counts half."""
        self._all[drafter].halve()
        for record in records:
            record.rates[drafter].halve()
            record.models[drafter].rate.halve()

    def took(self, round_s: float) -> None:
        """From drafts sent to tokens committed."""
        self._round_s.add(round_s, 1.0)

    @property
    def round_s(self) -> float:
        """0: not known yet."""
        return self._round_s.given(0.0, 1e-9)

    def waited(self, record: Record, model: str, num_wanted: int, steps: float) -> None:
        """A round waited for the model's drafts, as long as it takes for so many of its steps."""
        foreseen: float = self._lead_rate(record, model) ** (num_wanted + 1)
        self._wait_steps.add(steps, 1.0 - foreseen)

    def expected(self, record: Record, drafter: str, num_drafts: int) -> float:
        """Drafts accepted of so many: each is as likely as the others to be right, if those before it were."""
        rate = record.rates[drafter].given(self._all[drafter].given(_FIRST_GUESS, _PRIOR_DRAFTS), _PRIOR_DRAFTS)
        return _accepted(rate, num_drafts)

    def choose(self, record: Record, offers: Sequence[Offer]) -> Offer:
        """The one whose tokens come fastest. One model is among them, with one offer or more."""
        round_s = self.round_s

        def tokens_a_second(offer: Offer) -> float:
            return (1.0 + self.expected(record, offer.drafter, offer.num_drafts)) / max(round_s + offer.wait_s, 1e-9)

        best = max(offers, key=tokens_a_second)
        of_model = [offer for offer in offers if offer.drafter in record.models]
        standing = record.models[of_model[0].drafter]
        standing.since += 1
        if best in of_model and best.num_drafts:
            standing.try_after = _TRY_AFTER
        elif standing.since > standing.try_after:
            best = max(of_model, key=lambda offer: offer.num_drafts)
            standing.since, standing.try_after = 0, min(2 * standing.try_after, _TRY_AFTER_MOST)
        self.chosen[best.drafter] += best.num_drafts > 0
        return best

    def lead(self, record: Record, able: Collection[str], num_wanted: int, steps_s: Mapping[str, float]) -> str:
        """Which model drafts for the request's next round. able: those that can, one at least. num_wanted: drafts.
        steps_s: what a step of each takes, seconds."""
        leader = record.leader if record.leader in able else None
        for name, standing in record.models.items():
            standing.since += name != leader
        record.rounds_left -= 1
        if leader is not None and record.rounds_left > 0:
            return leader
        before = record.best if record.best in able else None
        errors = {name: 0.0 if before is None else _ERRORS if name == before else -_ERRORS for name in able}
        worth = {name: self._worth(record, name, num_wanted, steps_s[name], errors[name]) for name in able}
        best = max(worth, key=lambda name: worth[name])
        if before is not None and worth[best] <= _BETTER * worth[before]:
            best = before
        if best not in (before, None) and best == leader:  # it was tried, and is better
            self._try_after[best] = _TRY_AFTER
        record.best = record.leader = best
        record.rounds_left = _STINT if self.round_s else 1  # until then nothing is known of what a wait costs
        unheard = [name for name in able if self.is_unheard(record, name)]
        if unheard:
            record.leader = longest = max(unheard, key=lambda name: record.models[name].since)
            record.rounds_left, record.models[longest].since = _TRIAL, 0
            self._try_after[longest] = min(2 * self._try_after[longest], _TRY_AFTER_MOST)
        return record.leader

    def is_unheard(self, record: Record, model: str) -> bool:
        """It is to lead some rounds, whatever it is expected to earn."""
        return record.models[model].since > self._try_after[model]

    def news(self, record: Record) -> None:
        """Something is known of a model that does not draft: models are compared with the next round."""
        if record.leader == record.best:
            record.rounds_left = 0

    def _lead_rate(self, record: Record, model: str) -> float:
        return record.models[model].rate.given(self._all[model].given(_FIRST_GUESS, _PRIOR_DRAFTS), _PRIOR_LEAD)

    def _worth(self, record: Record, model: str, num_wanted: int, step_s: float, errors: float = 0.0) -> float:
        """Tokens a second, with the number of drafts that suits the model best. errors: standard errors that its rate
        is above what was counted."""
        rate, round_s = self._lead_rate(record, model), self.round_s
        error = math.sqrt(rate * (1.0 - rate) / (record.models[model].rate.looked_at + _PRIOR_LEAD))
        rate = min(max(rate + errors * error, 0.0), 1.0)
        wait_s = self._wait_steps.given(_FIRST_WAIT_STEPS, _PRIOR_ROUNDS) * step_s

        def tokens_a_second(num_drafts: int) -> float:
            foreseen = rate ** (num_drafts + 1)
            # Even then drafts are only there in time for as many steps as the target leaves.
            late_s = max((num_drafts + 1) * step_s - round_s, 0.0)
            took_s = round_s + ((1.0 - foreseen) * wait_s + foreseen * late_s if num_drafts else 0.0)
            return (1.0 + _accepted(rate, num_drafts)) / max(took_s, 1e-9)

        return max(tokens_a_second(num_drafts) for num_drafts in range(num_wanted + 1))


def _accepted(rate: float, num_drafts: int) -> float:
    return sum(itertools.accumulate([rate] * num_drafts, float.__mul__))
