"""Look-ups beside a draft model: each round's drafts are those of the drafter that earns most at that moment. Pure.

A look-up's drafts cost no step. Where a text repeats itself, or what others were answered, they are better than the
model's; elsewhere they are nearly all wrong. So all of them follow every text, and `DrafterSelector` compares them by
(1 + expected accepted drafts) / (seconds of a round + seconds that the model still needs for its drafts).

What the target commits says of every drafter how many of its drafts would have been accepted, sent or not: a look-up's
q is one-hot, so its draft is accepted with the probability that the target gives the token, and that is how often the
target's own token is that one. The same holds for the model's where verification is greedy or coupled. Under rejection
the model's drafts say something only in rounds that they were sent in. The choice depends on counts and on the text
before the round, never on which tokens the model drew: rejection stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.actors.drafter.draft_model import DraftModelProposer, verified
from outrider.actors.drafter.model_sequence import ModelSequence
from outrider.actors.drafter.proposer import Proposer, Work
from outrider.actors.drafter.sequence import Answer, Foreseen, SequenceKey
from outrider.actors.drafter.sequence import Sequence as DraftedSequence
from outrider.cluster.link.messages import Commit, ProposalStatus

MODEL = "draft_model"
"""The draft model's name among the drafters; a look-up has its method's."""

_FIRST_GUESS = 0.5
_PRIOR_DRAFTS = 2.0
"""Drafts that the rate over all requests counts for in a request's own."""

_KEEP_ALL, _KEEP_OWN = 0.995, 0.9
"""Share of the counts that is kept at each verdict: over all requests, and of a request's own. A text enters and leaves
what it repeats within a few rounds."""

_ROUND_WEIGHT = 0.1
"""Of the latest round's time in their mean."""

_TRY_AFTER = 64
"""Rounds without a verdict on the model after which its drafts are sent, whatever they are expected to earn."""


class Rate:
    """A fading acceptance rate: drafts that were right, of those that the target looked at."""

    def __init__(self, keep: float) -> None:
        self._keep, self.right, self.looked_at = keep, 0.0, 0.0

    def add(self, right: int, looked_at: int) -> None:
        if looked_at:
            self.right = self.right * self._keep + right
            self.looked_at = self.looked_at * self._keep + looked_at

    def given(self, prior: float) -> float:
        """The rate, where `prior` counts for some drafts."""
        return (self.right + _PRIOR_DRAFTS * prior) / (self.looked_at + _PRIOR_DRAFTS)


@dataclass(frozen=True)
class Offer:
    """Drafts that one drafter could send, and the seconds until they are there."""

    drafter: str
    num_drafts: int
    wait_s: float = 0.0


@dataclass(eq=False)
class Record:
    """How the drafters have done in one request. unheard: rounds since the last verdict on the model."""

    rates: dict[str, Rate]
    unheard: int = 0


class DrafterSelector:
    """Chooses whose drafts are sent, by acceptance rates and round times that it is told of."""

    def __init__(self, drafters: Sequence[str]) -> None:
        """drafters: the model among them."""
        self._all = {name: Rate(_KEEP_ALL) for name in drafters}
        self._round_s = 0.0
        self.chosen = dict.fromkeys(drafters, 0)
        self.judged, self.right = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)

    def record(self) -> Record:
        return Record({name: Rate(_KEEP_OWN) for name in self._all})

    def verdict(self, record: Record, drafter: str, right: int, looked_at: int) -> None:
        """The target has looked at so many of the drafter's drafts, and found so many right."""
        if drafter == MODEL and looked_at:
            record.unheard = 0
        self._all[drafter].add(right, looked_at)
        record.rates[drafter].add(right, looked_at)
        self.right[drafter] += right
        self.judged[drafter] += looked_at

    def took(self, round_s: float) -> None:
        """A round took so long, from drafts sent to tokens committed."""
        self._round_s += (round_s - self._round_s) * (_ROUND_WEIGHT if self._round_s else 1.0)

    def choose(self, record: Record, offers: Sequence[Offer]) -> Offer:
        """The offer whose tokens come fastest, or the model's largest, where it was not heard of for long."""
        best = max(offers, key=lambda offer: self._tokens_per_s(record, offer))
        record.unheard += 1
        if record.unheard > _TRY_AFTER:
            record.unheard = 0
            best = max((offer for offer in offers if offer.drafter == MODEL), key=lambda offer: offer.num_drafts)
        self.chosen[best.drafter] += best.num_drafts > 0
        return best

    def _tokens_per_s(self, record: Record, offer: Offer) -> float:
        rate = record.rates[offer.drafter].given(self._all[offer.drafter].given(_FIRST_GUESS))
        accepted = sum(rate**count for count in range(1, offer.num_drafts + 1))
        return (1.0 + accepted) / max(self._round_s + offer.wait_s, 1e-9)


@dataclass(eq=False)
class RequestDrafters:
    """One request, as all drafters know it."""

    record: Record
    lookups: dict[str, DraftedSequence]
    offered: dict[str, list[int]] = field(default_factory=dict)
    """Each drafter proposes these after the text as it is; they may not have been sent."""

    sender: str = MODEL
    """Whose drafts answer the last commit."""

    answered_at: float | None = None
    """When the last commit was answered; None: not yet."""


class LookupDrafters:
    """Implements Proposer: a draft model with look-ups beside it. Its sequences are the model's."""

    def __init__(
        self,
        model: DraftModelProposer,
        lookups: Mapping[str, Proposer[Any]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """lookups: by the names of their methods."""
        self.model, self.lookups, self._clock = model, dict(lookups), clock
        self.judge = DrafterSelector([MODEL, *lookups])
        self._beside: dict[ModelSequence, RequestDrafters] = {}
        self._worker: Proposer[Any] = model
        """Whose work was planned last."""

        self._reads = False

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return self.model.new_sequence(key)

    def open(self, sequence: ModelSequence) -> list[Answer]:
        beside = self._beside[sequence] = RequestDrafters(self.judge.record(), {})
        for name, lookup in self.lookups.items():
            own = beside.lookups[name] = lookup.new_sequence(sequence.key)
            own.sampling, own.num_speculative_tokens = sequence.sampling, sequence.num_speculative_tokens
            own.text, own.is_open = list(sequence.text), True
            lookup.open(own)  # it is the model that is waited for
        return self.model.open(sequence)

    def commit(self, sequence: ModelSequence, commit: Commit) -> list[Answer]:
        beside = self._beside[sequence]
        for name, drafts in beside.offered.items():
            self.judge.verdict(beside.record, name, *verified(drafts, commit.token_ids))
        if beside.answered_at is not None:
            self.judge.took(self._clock() - beside.answered_at)
        beside.offered, beside.answered_at, beside.sender = {}, None, MODEL
        for name, own in beside.lookups.items():
            answers = self.lookups[name].commit(own, commit)
            if answers and (drafts := list(answers[-1].proposals.token_ids)):
                beside.offered[name] = drafts
        return self._noted(self.model.commit(sequence, commit, lambda: self._instead(sequence)))

    def delivered(self) -> list[Answer]:
        return self._noted(self.model.delivered())

    def close(self, sequence: ModelSequence) -> None:
        for name, own in self._beside.pop(sequence).lookups.items():
            self.lookups[name].close(own)
        self.model.close(sequence)

    def unlink(self, link_id: int) -> None:
        for proposer in (self.model, *self.lookups.values()):
            proposer.unlink(link_id)

    def limit_vocabulary(self, size: int) -> None:
        for proposer in (self.model, *self.lookups.values()):
            proposer.limit_vocabulary(size)

    def plan(self) -> tuple[Work | None, list[Answer]]:
        """A look-up's reading and the model's work take turns: a piece of text is far shorter than a step."""
        self._reads = not self._reads
        if self._reads and (reading := self._reading()) is not None:
            return reading, []
        self._worker = self.model
        work, answers = self.model.plan()
        return work or self._reading(), self._noted(answers)

    def complete(self, work: Work) -> list[Answer]:
        answers = self._worker.complete(work)
        return self._noted(answers) if self._worker is self.model else []  # nobody waits for a look-up's

    def foreseen(self) -> list[Foreseen]:
        """None: each commit decides whose drafts answer it."""
        return []

    def step_us(self) -> int:
        return self.model.step_us()

    def usage(self) -> dict[str, float]:
        return self.model.usage()

    def counters(self) -> dict[str, Any]:
        counted = self.model.counters()
        for lookup in self.lookups.values():
            counted |= lookup.counters()
        judge = self.judge
        return counted | {"chosen": dict(judge.chosen), "judged": dict(judge.judged), "right": dict(judge.right)}

    def _reading(self) -> Work | None:
        for lookup in self.lookups.values():
            work, _ = lookup.plan()
            if work is not None:
                self._worker = lookup
                return work
        return None

    def _instead(self, sequence: ModelSequence) -> list[int] | None:
        """Drafts to send in place of the model's, which has the commit by now; None: the model's."""
        beside, start = self._beside[sequence], sequence.committed_len
        wanted = min(sequence.num_wanted, sequence.max_len - start)
        at_hand = min(sequence.num_drafted, wanted)
        missing = 0 if sequence.main.ended else max(min(sequence.num_on_miss, wanted) - at_hand, 0)
        offers = [Offer(MODEL, at_hand), *(Offer(name, min(len(d), wanted)) for name, d in beside.offered.items())]
        if missing:
            offers.append(Offer(MODEL, at_hand + missing, missing * self.model.step_us() / 1e6))
        chosen = self.judge.choose(beside.record, offers)
        if chosen.drafter == MODEL:
            if chosen.num_drafts <= at_hand:
                sequence.num_on_miss = at_hand  # what is there is enough
            return None
        beside.sender = chosen.drafter
        if sequence.free_of_rounds and at_hand:
            beside.offered[MODEL] = sequence.main.ids(start, start + at_hand)
        return beside.offered[chosen.drafter][:wanted]

    def _noted(self, answers: list[Answer]) -> list[Answer]:
        """The model's answers, of which those to the last commit of their request are remembered."""
        for sequence, proposals in answers:
            assert isinstance(sequence, ModelSequence)
            beside = self._beside.get(sequence)
            is_late = proposals.base_committed_len != sequence.committed_len
            if beside is None or is_late or proposals.status is not ProposalStatus.OK:
                continue
            beside.answered_at = self._clock()
            if beside.sender == MODEL and proposals.token_ids:
                beside.offered[MODEL] = list(proposals.token_ids)
        return answers
