"""Several drafters, one judge: look-ups beside a draft model, and for each round the one that earns most. Pure.

A look-up's drafts cost no step, and where a text repeats itself, or what others were answered, they are better than any
model's; elsewhere they are nearly all wrong. What the target commits says of every drafter how many of its drafts it
would have accepted, sent or not: a look-up's q is one-hot, so a draft of its is accepted with the probability that the
target gives the token, and that is how often the target's own token is that one. The same holds for a model's where
verification is greedy or coupled. So nobody is tried at the others' expense but a model under rejection, whose drafts
say nothing in a round that they were not sent in.

The choice is of tokens a second: (1 + expected drafts accepted) / (a round's seconds + what the model still has to
draft). It depends on what came before the round's tokens alone: on counts, and on how many drafts are at hand, never on
which tokens a model drew, so rejection stays exact.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outrider.actors.drafter.draft_model import DraftModelStrategy, verified
from outrider.actors.drafter.model_sequence import ModelSequence
from outrider.actors.drafter.sequence import Answer, SequenceKey
from outrider.actors.drafter.sequence import Sequence as DraftedSequence
from outrider.actors.drafter.strategy import DraftStrategy, Work
from outrider.cluster.link.messages import Commit, ProposalStatus

MODEL = "draft_model"

_FIRST_GUESS = 0.5
_KEEP_ALL, _KEEP_OWN = 0.995, 0.8
"""Of what was counted, at each verdict: over all requests, and of a request's own. A text enters and leaves what it
repeats within a few rounds."""

_PRIOR_DRAFTS = 2.0
"""Drafts that the others' rate counts for in a request's own."""

_TRY_AFTER, _TRY_AFTER_MOST = 24, 384
"""Rounds without a verdict on the model after which it drafts once, waited for or not: twice as many after each that
it was not chosen for itself."""


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


@dataclass(frozen=True)
class Offer:
    """num_drafts: that would be sent. wait_s: until they are there."""

    drafter: str
    num_drafts: int
    wait_s: float = 0.0


@dataclass
class Record:
    """Of one request: how its drafters have done. Made by `Judge.record`."""

    rates: dict[str, Rate]
    since_model: int = 0
    """Rounds since a verdict on the model."""

    try_after: int = _TRY_AFTER


class Judge:
    def __init__(self, drafters: Sequence[str]) -> None:
        self._all = {name: Rate(_KEEP_ALL) for name in drafters}
        self._round_s = Rate(0.9)
        self.chosen = dict.fromkeys(drafters, 0)
        self.judged, self.right = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)

    def record(self) -> Record:
        return Record({name: Rate(_KEEP_OWN) for name in self._all})

    def verdict(self, record: Record, drafter: str, right: int, looked_at: int) -> None:
        if drafter == MODEL and looked_at:
            record.since_model = 0
        self._all[drafter].add(right, looked_at)
        record.rates[drafter].add(right, looked_at)
        self.right[drafter] += right
        self.judged[drafter] += looked_at

    def took(self, round_s: float) -> None:
        """From drafts sent to tokens committed."""
        self._round_s.add(round_s, 1.0)

    def expected(self, record: Record, drafter: str, num_drafts: int) -> float:
        """Drafts accepted of so many: each is as likely as the others to be right, if those before it were."""
        rate = record.rates[drafter].given(self._all[drafter].given(_FIRST_GUESS, _PRIOR_DRAFTS), _PRIOR_DRAFTS)
        return sum(itertools.accumulate([rate] * num_drafts, float.__mul__))

    def choose(self, record: Record, offers: Sequence[Offer]) -> Offer:
        """The one whose tokens come fastest. The model is among them."""
        round_s = self._round_s.given(0.0, 1e-9)

        def tokens_a_second(offer: Offer) -> float:
            return (1.0 + self.expected(record, offer.drafter, offer.num_drafts)) / max(round_s + offer.wait_s, 1e-9)

        best = max(offers, key=tokens_a_second)
        record.since_model += 1
        if best.drafter == MODEL and best.num_drafts:
            record.try_after = _TRY_AFTER
        elif record.since_model > record.try_after:
            best = max((offer for offer in offers if offer.drafter == MODEL), key=lambda offer: offer.num_drafts)
            record.since_model, record.try_after = 0, min(2 * record.try_after, _TRY_AFTER_MOST)
        self.chosen[best.drafter] += best.num_drafts > 0
        return best


@dataclass(eq=False)
class Beside:
    """One sequence of the model's, as the look-ups know it."""

    record: Record
    lookups: dict[str, DraftedSequence]
    offered: dict[str, list[int]] = field(default_factory=dict)
    """What each would draft, or would have, after the text as it is."""

    sender: str = MODEL
    """Whose drafts answer the last commit."""

    answered_at: float | None = None
    """When."""


@dataclass(eq=False, slots=True)
class _LookUpWork:
    """Work of a look-up's own: reading."""

    is_step: ClassVar[bool] = False
    name: str
    work: Work

    def execute(self) -> None:
        self.work.execute()


class SeveralStrategy:
    """Implements DraftStrategy: a draft model with look-ups beside it. Its sequences are the model's."""

    def __init__(
        self,
        model: DraftModelStrategy,
        lookups: Mapping[str, DraftStrategy[Any]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """lookups: by the names of their methods."""
        self.model, self.lookups = model, dict(lookups)
        self._clock = clock
        self.judge = Judge([MODEL, *lookups])
        self._beside: dict[ModelSequence, Beside] = {}
        self._reads = False

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return self.model.new_sequence(key)

    def open(self, sequence: ModelSequence) -> list[Answer]:
        beside = Beside(self.judge.record(), {})
        for name, lookup in self.lookups.items():
            own = beside.lookups[name] = lookup.new_sequence(sequence.key)
            own.sampling, own.num_speculative_tokens = sequence.sampling, sequence.num_speculative_tokens
            own.text, own.is_open = list(sequence.text), True
            lookup.open(own)  # it is the model that is waited for
        self._beside[sequence] = beside
        return self.model.open(sequence)

    def commit(self, sequence: ModelSequence, commit: Commit) -> list[Answer]:
        beside = self._beside[sequence]
        self._hear(beside, commit)
        for name, own in beside.lookups.items():
            answers = self.lookups[name].commit(own, commit)
            if answers and (drafts := list(answers[-1].proposals.token_ids)):
                beside.offered[name] = drafts
        beside.sender = MODEL
        answers = self.model.commit(sequence, commit, lambda: self._instead(sequence, beside))
        self._sent(answers)
        return answers

    def delivered(self) -> list[Answer]:
        answers = self.model.delivered()
        self._sent(answers)
        return answers

    def close(self, sequence: ModelSequence) -> None:
        for name, own in self._beside.pop(sequence).lookups.items():
            self.lookups[name].close(own)
        self.model.close(sequence)

    def unlink(self, link_id: int) -> None:
        for strategy in (self.model, *self.lookups.values()):
            strategy.unlink(link_id)

    def limit_vocabulary(self, size: int) -> None:
        for strategy in (self.model, *self.lookups.values()):
            strategy.limit_vocabulary(size)

    def plan(self) -> tuple[Work | None, list[Answer]]:
        """A look-up's reading and the model's work take turns: a piece of text is far shorter than a step."""
        self._reads = not self._reads
        if self._reads and (reading := self._reading()) is not None:
            return reading, []
        work, answers = self.model.plan()
        self._sent(answers)
        return work or self._reading(), answers

    def complete(self, work: Work) -> list[Answer]:
        if isinstance(work, _LookUpWork):
            self.lookups[work.name].complete(work.work)  # nobody waits for it: what it says is not sent
            return []
        answers = self.model.complete(work)
        self._sent(answers)
        return answers

    def step_us(self) -> int:
        return self.model.step_us()

    def usage(self) -> dict[str, float]:
        return self.model.usage()

    def counters(self) -> dict[str, Any]:
        counted = self.model.counters()
        for lookup in self.lookups.values():
            counted |= lookup.counters()
        judge = self.judge
        counted |= {"chosen": dict(judge.chosen), "judged": dict(judge.judged), "right": dict(judge.right)}
        return counted

    def _reading(self) -> _LookUpWork | None:
        for name, lookup in self.lookups.items():
            work, _ = lookup.plan()
            if work is not None:
                return _LookUpWork(name, work)
        return None

    def _hear(self, beside: Beside, commit: Commit) -> None:
        """What the target said of everybody's drafts."""
        for name, drafts in beside.offered.items():
            self.judge.verdict(beside.record, name, *verified(drafts, commit.token_ids))
        beside.offered = {}
        if beside.answered_at is not None:
            self.judge.took(self._clock() - beside.answered_at)
            beside.answered_at = None

    def _instead(self, sequence: ModelSequence, beside: Beside) -> list[int] | None:
        """Drafts to send in place of the model's, which knows of the commit by now; None: the model's."""
        start, wanted = sequence.committed_len, min(sequence.num_wanted, sequence.max_len - sequence.committed_len)
        at_hand, enough = min(sequence.num_drafted, wanted), min(sequence.num_on_miss, wanted)
        missing = 0 if sequence.main.ended else max(enough - at_hand, 0)
        offers = [Offer(MODEL, at_hand)]
        if missing:
            offers.append(Offer(MODEL, at_hand + missing, missing * self.model.step_us() / 1e6))
        offers += [Offer(name, min(len(drafts), wanted)) for name, drafts in beside.offered.items()]
        chosen = self.judge.choose(beside.record, offers)
        if chosen.drafter == MODEL:
            if chosen.num_drafts <= at_hand:
                sequence.num_on_miss = at_hand  # what is there is enough
            return None
        beside.sender = chosen.drafter
        drafts = beside.offered[chosen.drafter][:wanted]
        if sequence.free_of_rounds and at_hand:
            beside.offered[MODEL] = sequence.main.ids(start, start + at_hand)
        return drafts

    def _sent(self, answers: Sequence[Answer]) -> None:
        for sequence, proposals in answers:
            if proposals.status is not ProposalStatus.OK or not isinstance(sequence, ModelSequence):
                continue
            beside = self._beside.get(sequence)
            if beside is None or proposals.base_committed_len != sequence.committed_len:
                continue
            beside.answered_at = self._clock()
            if beside.sender == MODEL and proposals.token_ids:
                beside.offered[MODEL] = list(proposals.token_ids)
