"""Combines a draft model with look-ups: each round is drafted by whichever is expected to bring most tokens a second.
Imports neither vLLM, Ray nor torch.

A look-up's drafts cost no step. Where a text repeats itself, or what others were answered, they are better than the
model's; elsewhere they are nearly all wrong. So all of them follow every text, and what is compared is
(1 + expected accepted drafts) / (seconds of a round + seconds that the model still needs for its drafts).

The committed tokens tell of every drafter how many of its drafts would have been accepted, sent or not: a look-up's q
is one-hot, so its draft is accepted with the probability that the target gives the token, and that is how often the
target's own token is that one. The same holds for the model's where verification is greedy or coupled. Under rejection
the model's drafts say something only in rounds that they were sent in. The choice depends on counts and on the text
before the round, never on which tokens the model drew: rejection stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.model_sequence import ModelSequence
from outrider.actors.drafter.proposer import Proposer, SequenceKey, Work
from outrider.actors.drafter.proposer import Sequence as DraftedSequence
from outrider.cluster.link.messages import Commit

MODEL = "draft_model"
"""The draft model's name among the drafters; a look-up has its method's."""

_FIRST_GUESS = 0.5
_PRIOR_DRAFTS = 2.0
"""Drafts that the rate over all requests counts for in a request's own."""

_KEEP_ALL, _KEEP_OWN = 0.995, 0.9
"""Share of the counts that is kept with each new one: over all requests, and of a request's own. A text enters and
leaves what it repeats within a few rounds."""

_ROUND_WEIGHT = 0.1
"""Weight of the latest round in the moving average of their times."""


class Rate:
    """Estimates an acceptance rate: accepted drafts of those that the target looked at. Old ones fade."""

    def __init__(self, keep: float) -> None:
        self._keep, self._accepted, self._looked_at = keep, 0.0, 0.0

    def observe(self, drafts: Sequence[int], token_ids: Sequence[int]) -> None:
        """Compares drafts, sent or not, with the committed tokens, up to the first difference."""
        same = [draft == token for draft, token in zip(drafts, token_ids, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        if same:
            self._accepted = self._accepted * self._keep + accepted
            self._looked_at = self._looked_at * self._keep + min(accepted + 1, len(same))

    def given(self, prior: float) -> float:
        """Returns the rate, where `prior` counts for some drafts."""
        return (self._accepted + _PRIOR_DRAFTS * prior) / (self._looked_at + _PRIOR_DRAFTS)


@dataclass(eq=False)
class RequestDrafters:
    """Holds what the look-ups know of one request, and how its drafters have done."""

    rates: dict[str, Rate]
    lookups: dict[str, DraftedSequence] = field(default_factory=dict)
    offered: dict[str, list[int]] = field(default_factory=dict)
    """Drafts after the text as it is, sent or not. The model's are here where a look-up's were sent."""

    model_answers: bool = True
    """The model's drafts answer the last commit."""

    ready_at: float | None = None
    """When the drafts that answer the last commit are expected to be there."""


class LookupDrafters:
    """Implements Proposer with a draft model and look-ups. Its sequences and its outbox are the model's."""

    def __init__(
        self,
        model: DraftModelProposer,
        lookups: Mapping[str, Proposer[Any]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """lookups: by the names of their methods."""
        self.model, self.lookups, self._clock = model, dict(lookups), clock
        self.outbox = model.outbox
        model.sends_ahead = False
        self._rates = {name: Rate(_KEEP_ALL) for name in (MODEL, *lookups)}
        self.chosen = dict.fromkeys(self._rates, 0)
        """Commits that each drafter's drafts answered."""

        self._round_s = 0.0
        """Moving average of the time from drafts to the commit."""

        self._requests: dict[ModelSequence, RequestDrafters] = {}
        self._worker: Proposer[Any] = model
        """The proposer whose work was planned last."""

        self._reads = False

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return self.model.new_sequence(key)

    def open(self, sequence: ModelSequence) -> None:
        request = self._requests[sequence] = RequestDrafters({name: Rate(_KEEP_OWN) for name in self._rates})
        for name, lookup in self.lookups.items():
            own = request.lookups[name] = lookup.new_sequence(sequence.key)
            own.sampling, own.text = sequence.sampling, list(sequence.text)
            lookup.open(own)
            lookup.outbox.drain()  # the verifier waits for the model
        self.model.open(sequence)

    def commit(self, sequence: ModelSequence, commit: Commit) -> None:
        request = self._requests[sequence]
        if request.model_answers and sequence.num_proposed:
            base = sequence.committed_len
            request.offered[MODEL] = sequence.main.ids(base, base + sequence.num_proposed)
        for name, drafts in request.offered.items():
            for rate in (self._rates[name], request.rates[name]):
                rate.observe(drafts, commit.token_ids)
        if request.ready_at is not None:
            round_s = max(self._clock() - request.ready_at, 0.0)
            self._round_s += (round_s - self._round_s) * (_ROUND_WEIGHT if self._round_s else 1.0)
        request.offered, request.ready_at, request.model_answers = {}, None, True
        for name, own in request.lookups.items():
            self.lookups[name].commit(own, commit)
            for _, answer in self.lookups[name].outbox.drain():
                if answer.token_ids:
                    request.offered[name] = list(answer.token_ids)
        self.model.commit(sequence, commit, lambda: self._look_up(sequence))

    def close(self, sequence: ModelSequence) -> None:
        for name, own in self._requests.pop(sequence).lookups.items():
            self.lookups[name].close(own)
        self.model.close(sequence)

    def limit_vocabulary(self, size: int) -> None:
        for proposer in (self.model, *self.lookups.values()):
            proposer.limit_vocabulary(size)

    def plan(self) -> Work | None:
        """Plans a look-up's reading and the model's work in turn: a piece of text is far shorter than a step."""
        self._reads = not self._reads
        if self._reads and (reading := self._reading()) is not None:
            return reading
        self._worker = self.model
        return self.model.plan() or self._reading()

    def complete(self, work: Work) -> None:
        self._worker.complete(work)
        if self._worker is not self.model:
            self._worker.outbox.drain()  # nobody waits for a look-up's answers

    def step_us(self) -> int:
        return self.model.step_us()

    def usage(self) -> dict[str, float]:
        return self.model.usage()

    def counters(self) -> dict[str, Any]:
        counted = self.model.counters() | {"chosen": dict(self.chosen)}
        for lookup in self.lookups.values():
            counted |= lookup.counters()
        return counted

    def _reading(self) -> Work | None:
        for lookup in self.lookups.values():
            if (work := lookup.plan()) is not None:
                self._worker = lookup
                return work
        return None

    def _look_up(self, sequence: ModelSequence) -> list[int] | None:
        """Returns drafts to send in place of the model's, which has the commit by now; None: the model's are sent."""
        request, start = self._requests[sequence], sequence.committed_len
        wanted = min(sequence.num_wanted, sequence.max_len - start)
        at_hand = min(sequence.num_drafted, wanted)
        offers = [(name, min(len(drafts), wanted), 0.0) for name, drafts in request.offered.items()]
        offers.append((MODEL, at_hand, 0.0))
        if missing := sequence.num_missing:
            offers.append((MODEL, at_hand + missing, missing * self.model.step_us() / 1e6))
        best, num_drafts, wait_s = max(offers, key=lambda offer: self._tokens_per_s(request, *offer))
        self.chosen[best] += num_drafts > 0
        request.ready_at = self._clock() + wait_s
        if best == MODEL:
            if num_drafts == at_hand:
                sequence.num_on_miss = at_hand  # what is there is enough
            return None
        request.model_answers = False
        drafts = request.offered[best][:wanted]
        if at_hand and not sequence.drawn_per_round:
            request.offered[MODEL] = sequence.main.ids(start, start + at_hand)
        return drafts

    def _tokens_per_s(self, request: RequestDrafters, name: str, num_drafts: int, wait_s: float) -> float:
        """Returns what so many drafts of a drafter bring that come after `wait_s`."""
        rate = request.rates[name].given(self._rates[name].given(_FIRST_GUESS))
        accepted = sum(rate**count for count in range(1, num_drafts + 1))
        return (1.0 + accepted) / max(self._round_s + wait_s, 1e-9)
