"""Which of several drafters earns most: measured acceptance and step times, for each round and for each request. Pure.

Two choices. A look-up's drafts or a model's, for every round (`choose`): tokens a second are (1 + expected drafts
accepted) / (a round's seconds + what the model still has to draft). And of several models the one that drafts for a
request (`lead`): a round takes as long as the target verifies, and longer where its outcome was not foreseen, by a step
of the model's for each draft that is waited for then.

Both hang on counts, and on what came before the round's tokens, never on which tokens a model drew: rejection stays
exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

MODEL = "draft_model"
"""The drafter's own model; others have the names that the configuration gives them."""

_FIRST_GUESS = 0.5
_KEEP_ALL, _KEEP_MODEL, _KEEP_LOOKUP = 0.995, 0.97, 0.8
"""Of what was counted, at each verdict: over all requests, and of a request's own, of a model and of a look-up. A text
enters and leaves what it repeats within a few rounds."""

_PRIOR_DRAFTS, _PRIOR_LEAD = 2.0, 8.0
"""Drafts that the others' rate counts for in a request's own; likewise for the choice of its model."""

_TRY_AFTER, _TRY_AFTER_MOST = 24, 384
"""Rounds without a verdict on a model after which it drafts, whatever it is expected to earn: twice as many each time,
until it is chosen for itself."""

_TRIAL = 4
"""Rounds that a model drafts for which is tried."""

_ERRORS = 0.5
"""A model takes the place of the one that drafts if it earns more even where its rate is so many standard errors lower
than counted, and the other's as many higher."""


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

    trial_left: int = 0
    """Rounds."""


class Judge:
    def __init__(self, drafters: Sequence[str], models: Sequence[str] = (MODEL,)) -> None:
        """drafters: all of them; models: those among them that are no look-ups."""
        self._all = {name: Rate(_KEEP_ALL) for name in drafters}
        self._models = tuple(models)
        self._try_after = dict.fromkeys(models, _TRY_AFTER)
        """Another model having led that often."""

        self._round_s = Rate(0.9)
        self.together = self.record()
        """For requests that all have the same model: what is counted of each is all that is known of them."""

        self.chosen = dict.fromkeys(drafters, 0)
        self.judged, self.right = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)

    def record(self) -> Record:
        rates = {name: Rate(_KEEP_MODEL if name in self._models else _KEEP_LOOKUP) for name in self._all}
        return Record(rates, {name: Standing() for name in self._models})

    def verdict(self, record: Record, drafter: str, right: int, looked_at: int) -> None:
        if drafter in record.models and looked_at:
            record.models[drafter].since = self.together.models[drafter].since = 0
        self._all[drafter].add(right, looked_at)
        record.rates[drafter].add(right, looked_at)
        self.right[drafter] += right
        self.judged[drafter] += looked_at

    def changed(self, drafter: str, records: Iterable[Record]) -> None:
        """Another version of it drafts from now on: what was counted of it counts half."""
        self._all[drafter].halve()
        for record in records:
            record.rates[drafter].halve()

    def took(self, round_s: float) -> None:
        """From drafts sent to tokens committed."""
        self._round_s.add(round_s, 1.0)

    @property
    def round_s(self) -> float:
        """0: not known yet."""
        return self._round_s.given(0.0, 1e-9)

    def expected(self, record: Record, drafter: str, num_drafts: int) -> float:
        """Drafts accepted of so many."""
        rate = self._rate(record, drafter, _PRIOR_DRAFTS)
        return sum(itertools.accumulate([rate] * num_drafts, float.__mul__))

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

    def lead(
        self,
        record: Record,
        able: Collection[str],
        num_wanted: int,
        num_on_miss: int,
        steps_s: Mapping[str, float],
    ) -> str:
        """Which model drafts for the request's next round. able: those that can, one at least. num_wanted: drafts, and
        num_on_miss of them are waited for. steps_s: what a step of each takes, seconds."""
        leader = record.leader if record.leader in able else None
        for name, standing in record.models.items():
            standing.since += name != leader
        record.trial_left -= 1
        if leader is not None and record.trial_left > 0:
            return leader
        before = record.best if record.best in able else None
        errors = {name: 0.0 if before is None else _ERRORS if name == before else -_ERRORS for name in able}
        worth = {name: self._worth(record, name, num_wanted, num_on_miss, steps_s[name], errors[name]) for name in able}
        best = max(worth, key=lambda name: worth[name])
        if best != before and best == leader:  # it was tried, and is better
            self._try_after[best] = _TRY_AFTER
        record.best = record.leader = best
        if unheard := [name for name in able if name != best and self.is_unheard(record, name)]:
            record.leader = longest = max(unheard, key=lambda name: record.models[name].since)
            record.trial_left, record.models[longest].since = _TRIAL, 0
            self._try_after[longest] = min(2 * self._try_after[longest], _TRY_AFTER_MOST)
        return record.leader

    def is_unheard(self, record: Record, model: str) -> bool:
        """It is to lead some rounds, whatever it is expected to earn."""
        return record.models[model].since > self._try_after[model]

    def _rate(self, record: Record, drafter: str, prior: float) -> float:
        """Of drafts that are right, if those before them were. prior: drafts that the others' rate counts for."""
        return record.rates[drafter].given(self._all[drafter].given(_FIRST_GUESS, _PRIOR_DRAFTS), prior)

    def _worth(
        self, record: Record, model: str, num_wanted: int, num_on_miss: int, step_s: float, errors: float
    ) -> float:
        """Tokens a second, with the number of drafts that suits the model best. errors: standard errors that its rate
        is above what was counted."""
        rate, round_s = self._rate(record, model, _PRIOR_LEAD), self.round_s
        error = math.sqrt(rate * (1.0 - rate) / (record.rates[model].looked_at + _PRIOR_LEAD))
        rate = min(max(rate + errors * error, 0.0), 1.0)
        best, accepted, reached = 1.0 / max(round_s, 1e-9), 0.0, 1.0
        for num_drafts in range(1, num_wanted + 1):
            reached *= rate
            accepted += reached
            foreseen = reached * rate
            wait_s = min(num_drafts, num_on_miss) * step_s
            # Even then drafts are only there in time for as many steps as the target leaves.
            late_s = max((num_drafts + 1) * step_s - round_s, 0.0)
            took_s = round_s + (1.0 - foreseen) * wait_s + foreseen * late_s
            best = max(best, (1.0 + accepted) / max(took_s, 1e-9))
        return best
