"""Several drafters, one judge: look-ups beside one draft model or more, and each request gets whoever earns most. Pure.

A look-up's drafts cost no step, and where a text repeats itself, or what others were answered, they are better than any
model's; elsewhere they are nearly all wrong. Of models the larger one is right more often and takes longer for it. What
the target commits says of every drafter how many of its drafts it would have accepted, sent or not: a look-up's q is
one-hot, so a draft of its is accepted with the probability that the target gives the token, and that is how often the
target's own token is that one. The same holds for a model's where verification is greedy or coupled. So nobody is tried
at the others' expense but a model under rejection, whose drafts say nothing in a round that they were not sent in.

Of several models one *leads* a request: it drafts for it, and ahead. The others rest: they take every commit as one
that wants no drafts, and now and then, while the target verifies, read what was committed in one step that draws in the
place of each of its tokens. So they are judged, and can take over with the next round that asks for drafts.
`judge.py` says who leads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.actors.drafter.draft_model import DraftModelStrategy, WeightsChange, verified
from outrider.actors.drafter.judge import MODEL, Judge, Offer, Record
from outrider.actors.drafter.model_sequence import ModelSequence
from outrider.actors.drafter.pause import Pause
from outrider.actors.drafter.sequence import Answer, Foreseen, SequenceKey
from outrider.actors.drafter.sequence import Sequence as DraftedSequence
from outrider.actors.drafter.strategy import DraftStrategy, Work
from outrider.cluster.link.messages import Commit, ProposalStatus

_SCORED_TOKENS = 24
"""Of a text at most in one step: fewer than a draft step may have to catch up with."""

_SCORE_AFTER, _SCORE_AFTER_MOST = 8, 256
"""Committed tokens after which a resting model is judged by them, though the one that leads has more to draft: twice as
many each time that it goes on resting."""

_SCORE_IDLE = 16
"""Likewise while that one has nothing to draft."""

_MANY = 8
"""Requests of one link: with more of them all have the same leader, since steps of two models would take turns."""

_URGENT_IN_ROW = 4
"""Steps for those who wait, after which another model's prompts get a turn."""


@dataclass(eq=False)
class Beside:
    """One request, as all drafters know it."""

    models: dict[str, ModelSequence]
    """The first of them is the draft loop's."""

    record: Record
    leader: str
    lookups: dict[str, DraftedSequence] = field(default_factory=dict)
    offered: dict[str, list[int]] = field(default_factory=dict)
    """What each would draft, or would have, after the text as it is."""

    sender: str = MODEL
    """Whose drafts answer the last commit."""

    length: int = 0
    """Of the text, the last commit's tokens too."""

    wanted: tuple[int, int] = (0, 0)
    """Drafts that the last commit wants, and on a miss."""

    asked_at: float = 0.0
    """When it came."""

    answered_at: float | None = None
    """When it was answered."""

    is_ready: bool = False
    """The target has been told."""

    out_of_kv_to: dict[str, int] = field(default_factory=dict)
    """Models that had no room in their KV caches, and the length of the text from which they are asked again."""

    scored_to: dict[str, int] = field(default_factory=dict)
    """Of each model the length of the text by which it has been judged at rest, or led."""

    score_after: dict[str, int] = field(default_factory=dict)

    def has_kv(self, model: str) -> bool:
        return self.out_of_kv_to.get(model, 0) <= self.length

    @property
    def sequence(self) -> ModelSequence:
        return self.models[MODEL]

    @property
    def leads(self) -> ModelSequence:
        return self.models[self.leader]


@dataclass(eq=False, slots=True)
class Part:
    """Work of one of the drafters."""

    name: str
    work: Work

    @property
    def is_step(self) -> bool:
        return self.work.is_step

    def execute(self) -> None:
        self.work.execute()


class SeveralStrategy:
    """Implements DraftStrategy: draft models with look-ups beside them. Its sequences are the first model's."""

    def __init__(
        self,
        model: DraftModelStrategy,
        lookups: Mapping[str, DraftStrategy[Any]],
        clock: Callable[[], float] = time.perf_counter,
        also: Mapping[str, DraftModelStrategy] | None = None,
    ) -> None:
        """lookups: by the names of their methods. also: other models, by their names."""
        self.models = {MODEL: model, **(also or {})}
        self.lookups = dict(lookups)
        self._clock = clock
        self.judge = Judge([*self.models, *lookups], tuple(self.models))
        self._beside: dict[ModelSequence, Beside] = {}
        """By the sequences of all models."""

        self._requests: dict[Beside, None] = {}
        self._of_link: Counter[int] = Counter()
        self._reads = False
        self._turns = list(self.models)
        """Who had no step for longest comes first."""

        self._urgent_in_row = 0
        self._handed_on = False
        """Another model is to answer what one could not."""

        self._answered_last = MODEL

    @property
    def model(self) -> DraftModelStrategy:
        """The first one."""
        return self.models[MODEL]

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return self.model.new_sequence(key)

    def open(self, sequence: ModelSequence) -> list[Answer]:
        models = {
            name: sequence if name == MODEL else model.new_sequence(sequence.key) for name, model in self.models.items()
        }
        beside = Beside(models, self.judge.record(), MODEL, length=sequence.committed_len)
        for name, lookup in self.lookups.items():
            own = beside.lookups[name] = _same(lookup.new_sequence(sequence.key), sequence)
            lookup.open(own)  # it is a model that is waited for
        self._requests[beside] = None
        self._of_link[sequence.key[0]] += 1
        answers: list[Answer] = []
        for name, own_of_model in models.items():
            if name != MODEL:
                own_of_model = _same(own_of_model, sequence)
                own_of_model.name = sequence.name
            self._beside[own_of_model] = beside
            beside.scored_to[name], beside.score_after[name] = sequence.committed_len, _SCORE_AFTER
            answers += self._of(name, self.models[name].open(own_of_model))
        return answers

    def commit(self, sequence: ModelSequence, commit: Commit) -> list[Answer]:
        beside = self._beside[sequence]
        self._hear(beside, commit)
        for name, own in beside.lookups.items():
            answers = self.lookups[name].commit(own, commit)
            if answers and (drafts := list(answers[-1].proposals.token_ids)):
                beside.offered[name] = drafts
        beside.length, beside.wanted = commit.committed_len, (commit.num_wanted, commit.num_on_miss)
        self._choose_leader(beside, commit)
        beside.sender = beside.leader
        said: list[Answer] = []
        if len(beside.models) > 1:
            without = Commit(commit.request, commit.base_committed_len, commit.token_ids, 0, 0)
            for name, model in self.models.items():
                if name != beside.leader:
                    said += self._of(name, model.commit(beside.models[name], without))
        leader = self.models[beside.leader]
        said += self._of(beside.leader, leader.commit(beside.leads, commit, lambda: self._instead(beside)))
        if commit.has_drafts:
            at = commit.committed_len
            self.judge.chosen[beside.leader] += 1
            self._answered(beside.leader, beside, at, beside.leads.main.ids(at, at + commit.num_wanted))
        return said

    def delivered(self) -> list[Answer]:
        return [answer for name, model in self.models.items() for answer in self._of(name, model.delivered())]

    def close(self, sequence: ModelSequence) -> None:
        beside = self._beside[sequence]
        for name, own in beside.lookups.items():
            self.lookups[name].close(own)
        for name, own_of_model in beside.models.items():
            del self._beside[own_of_model]
            self.models[name].close(own_of_model)
        del self._requests[beside]
        self._of_link[sequence.key[0]] -= 1

    def unlink(self, link_id: int) -> None:
        self._of_link.pop(link_id, None)
        for strategy in (*self.models.values(), *self.lookups.values()):
            strategy.unlink(link_id)

    def limit_vocabulary(self, size: int) -> None:
        for strategy in (*self.models.values(), *self.lookups.values()):
            strategy.limit_vocabulary(size)

    def plan(self) -> tuple[Work | None, list[Answer]]:
        """A look-up's reading and the models' work take turns: a piece of text is far shorter than a step."""
        self._reads = not self._reads
        if self._reads and (reading := self._reading()) is not None:
            return reading, []
        answers: list[Answer] = []
        self._handed_on = True
        work: Part | None = None
        while work is None and self._handed_on:
            self._handed_on = False
            work, more = self._of_models()
            answers += more
        return work or self._reading(), answers

    def complete(self, work: Work) -> list[Answer]:
        assert isinstance(work, Part)
        if work.name in self.lookups:
            self.lookups[work.name].complete(work.work)  # nobody waits for it: what it says is not sent
            return []
        model = self.models[work.name]
        answers = self._of(work.name, model.complete(work.work))
        if isinstance(work.work, WeightsChange):
            self.judge.changed(work.name, [beside.record for beside in self._requests])
        for own, (right, looked_at) in model.take_scores().items():
            if (beside := self._beside.get(own)) is not None:
                self.judge.verdict(beside.record, work.name, right, looked_at)
        return answers

    def foreseen(self) -> list[Foreseen]:
        """None beside look-ups, where each commit decides whose drafts answer it, and none for a request that is to
        have another leader: its next commit shall ask."""
        if self.lookups:
            return []
        found = [each for model in self.models.values() for each in model.foreseen()]
        return [each for each in found if self._stays(each.sequence)]

    def step_us(self) -> int:
        """Of the model that answered last."""
        return self.models[self._answered_last].step_us()

    def usage(self) -> dict[str, float]:
        of_each = [model.usage() for model in self.models.values()]
        summed = {key: sum(usage[key] for usage in of_each) for key in ("num_side_branches", "branch_blocks")}
        # A request can be drafted for as soon as one model has read its prompt.
        prefilling = sum(
            not any(own.can_draft or own.retired for own in beside.models.values()) for beside in self._requests
        )
        fullest = max(usage["kv_cache_usage"] for usage in of_each)
        return {**of_each[0], **summed, "num_prefilling": prefilling, "kv_cache_usage": fullest}

    def counters(self) -> dict[str, Any]:
        counted = self.model.counters()
        others = {name: model.counters() for name, model in self.models.items() if name != MODEL}
        if others:
            counted["steps_of"] = {MODEL: counted["step_seconds"]}
        for name, own in others.items():
            counted["steps_of"][name] = own["step_seconds"]
            for key in ("vocabulary_observed", "vocabulary_missed"):
                if key in own:
                    counted[key] = counted.get(key, 0) + own[key]
            for link_id, steps in own["link_steps"].items():
                counted["link_steps"][link_id] = counted["link_steps"].get(link_id, 0.0) + steps
        for lookup in self.lookups.values():
            counted |= lookup.counters()
        judge = self.judge
        counted |= {"chosen": dict(judge.chosen), "judged": dict(judge.judged), "right": dict(judge.right)}
        return counted

    # Whose work is next.

    def _of_models(self) -> tuple[Part | None, list[Answer]]:
        """Who waits for an answer comes first, whoever asked first. Then resting models are judged, in turn with what
        is drafted ahead, and last come texts that nobody wants drafts of. A pause is one for all."""
        if len(self.models) == 1:
            work, answers = self.model.plan()
            return None if work is None else Part(MODEL, work), self._of(MODEL, answers)
        urgent = self._urgent()
        turns = sorted(self._turns, key=lambda name: name != urgent)
        if urgent is None:
            self._urgent_in_row = 0
            if (scoring := self._scoring(is_idle=False)) is not None:
                return scoring, []
        else:
            self._urgent_in_row += 1
            others_read = [name for name in turns if name != urgent and self.models[name].has_prompts]
            if self._urgent_in_row > _URGENT_IN_ROW and others_read:
                self._urgent_in_row = 0
                turns.sort(key=lambda name: name not in others_read)
        answers, pause = [], None
        for is_idle in (False, True):
            for name in turns:
                work, more = self.models[name].plan(is_idle)
                answers += self._of(name, more)
                if isinstance(work, Pause):
                    pause = pause or Part(name, work)
                elif work is not None:
                    self._turns.remove(name)
                    self._turns.append(name)
                    return Part(name, work), answers
            if self._handed_on:
                return None, answers
            if pause is not None:
                return pause, answers
            if not is_idle and (scoring := self._scoring(is_idle=True)) is not None:
                return scoring, answers
        return None, answers

    def _urgent(self) -> str | None:
        """The model that leads the request that has waited longest for an answer."""
        due = [beside for beside in self._requests if beside.leads.due and beside.leads.can_draft]
        return min(due, key=lambda beside: beside.asked_at).leader if due else None

    def _scoring(self, is_idle: bool) -> Part | None:
        """A step that judges a resting model, or reads for one what it is to be tried on. is_idle: nobody has anything
        to draft."""
        for name in self._turns:
            model, is_late = self.models[name], False
            spans: dict[ModelSequence, int] = {}
            for beside in self._requests:
                own = beside.models[name]
                if name == beside.leader or not own.started or own.retired:
                    continue
                if not own.free_of_rounds:
                    if not own.can_draft and self.judge.is_unheard(beside.record, name):
                        spans[own] = own.committed_len
                    continue
                unscored, after = own.committed_len - beside.scored_to[name], beside.score_after[name]
                if unscored >= (min(_SCORE_IDLE, after) if is_idle else after):
                    spans[own] = max(own.committed_len - _SCORED_TOKENS, beside.scored_to[name])
                    is_late |= unscored >= 2 * after
            if not spans or not (is_late or self._has_time(model.step_us() / 1e6)):
                continue
            if (step := model.score(spans)) is None:
                continue
            for row, (own, _) in zip(step.plan.rows, step.targets, strict=True):
                beside = self._beside[own]
                if row.draw is not None and beside.scored_to[name] < own.committed_len:
                    beside.scored_to[name] = own.committed_len
                    beside.score_after[name] = min(2 * beside.score_after[name], _SCORE_AFTER_MOST)
            return Part(name, step)
        return None

    def _has_time(self, step_s: float) -> bool:
        """No target is about to ask that is waited for alone: it would wait for the step."""
        if len(self._requests) > _MANY:
            return True
        ends = self._clock() + step_s
        verifying = [beside.answered_at for beside in self._requests if beside.answered_at is not None]
        return all(answered_at + self.judge.round_s >= ends for answered_at in verifying)

    def _reading(self) -> Part | None:
        for name, lookup in self.lookups.items():
            work, _ = lookup.plan()
            if work is not None:
                return Part(name, work)
        return None

    # Who leads.

    def _choose_leader(self, beside: Beside, commit: Commit) -> None:
        """By what came before the round that starts with this commit."""
        if len(beside.models) == 1 or commit.num_wanted == 0:
            return
        num_tokens = len(commit.token_ids)
        able = [name for name, own in beside.models.items() if own.will_draft_after(num_tokens) and beside.has_kv(name)]
        if not able:
            if beside.leads.retired and not commit.has_drafts:  # its text fits another, which has not read it
                others = (name for name, own in beside.models.items() if not own.retired)
                self._lead(beside, next(others, beside.leader))
            return
        steps_s = {name: self.models[name].step_us() / 1e6 for name in able}
        record, num_wanted, num_on_miss = self._lead_record(beside), commit.num_wanted, commit.num_on_miss
        leader = self.judge.lead(record, able, num_wanted, num_on_miss, steps_s)
        if not commit.has_drafts:  # else the drafts of this round are the present one's
            self._lead(beside, leader)

    def _lead_record(self, beside: Beside) -> Record:
        many = self._of_link[beside.sequence.key[0]] > _MANY
        return self.judge.together if many else beside.record

    def _stays(self, sequence: DraftedSequence) -> bool:
        """The request's leader is the one that was chosen last."""
        assert isinstance(sequence, ModelSequence)
        beside = self._beside[sequence]
        return self._lead_record(beside).leader == beside.leader

    def _lead(self, beside: Beside, leader: str) -> None:
        if leader != beside.leader:
            beside.scored_to[beside.leader] = beside.length
            beside.score_after = dict.fromkeys(beside.models, _SCORE_AFTER)
            beside.leader = leader

    def _hand_on(self, beside: Beside, status: ProposalStatus) -> bool:
        """To another model what the leader cannot answer."""
        if status is ProposalStatus.OUT_OF_KV:
            beside.out_of_kv_to[beside.leader] = beside.length + _SCORE_AFTER_MOST
        for name, own in beside.models.items():
            if name != beside.leader and own.can_draft and beside.has_kv(name):
                self._lead(beside, name)
                beside.sender = name
                self.models[name].lead(own, *beside.wanted)
                self._handed_on = True
                return True
        return False

    # What the target says, and what it is told.

    def _hear(self, beside: Beside, commit: Commit) -> None:
        """What the target said of everybody's drafts."""
        for name, drafts in beside.offered.items():
            self.judge.verdict(beside.record, name, *verified(drafts, commit.token_ids))
        beside.offered = {}
        beside.asked_at = self._clock()
        if beside.answered_at is not None:
            self.judge.took(beside.asked_at - beside.answered_at)
            beside.answered_at = None

    def _instead(self, beside: Beside) -> list[int] | None:
        """Drafts to send in place of the leader's, which knows of the commit by now; None: the leader's."""
        sequence, leader = beside.leads, beside.leader
        start, wanted = sequence.committed_len, min(sequence.num_wanted, sequence.max_len - sequence.committed_len)
        at_hand, enough = min(sequence.num_drafted, wanted), min(sequence.num_on_miss, wanted)
        missing = 0 if sequence.main.ended else max(enough - at_hand, 0)
        offers = [Offer(leader, at_hand)]
        if missing:
            offers.append(Offer(leader, at_hand + missing, missing * self.models[leader].step_us() / 1e6))
        offers += [Offer(name, min(len(drafts), wanted)) for name, drafts in beside.offered.items()]
        chosen = self.judge.choose(beside.record, offers)
        if chosen.drafter == leader:
            if chosen.num_drafts <= at_hand:
                sequence.num_on_miss = at_hand  # what is there is enough
            return None
        beside.sender = chosen.drafter
        drafts = beside.offered[chosen.drafter][:wanted]
        if sequence.free_of_rounds and at_hand:
            beside.offered[leader] = sequence.main.ids(start, start + at_hand)
        return drafts

    def _of(self, name: str, answers: Sequence[Answer]) -> list[Answer]:
        """A model's answers, as they are sent: about the loop's own sequence, and not before another model that can
        answer has been asked."""
        said: list[Answer] = []
        for sequence, proposals in answers:
            assert isinstance(sequence, ModelSequence)
            beside = self._beside.get(sequence)
            if beside is None:  # closed meanwhile
                continue
            if proposals.status is ProposalStatus.READY:
                if beside.is_ready:
                    continue
                beside.is_ready = True
            elif proposals.status is ProposalStatus.OK:
                self._answered(name, beside, proposals.base_committed_len, list(proposals.token_ids))
            elif self._hand_on(beside, proposals.status):
                continue
            elif proposals.status is ProposalStatus.NOT_READY:
                beside.is_ready = False
                for own in beside.models.values():
                    own.announced = False
            said.append(Answer(beside.sequence, proposals))
        return said

    def _answered(self, name: str, beside: Beside, base_committed_len: int, drafts: list[int]) -> None:
        if base_committed_len != beside.length:  # it is overtaken
            return
        self._answered_last = name
        beside.answered_at = self._clock()
        if drafts and beside.sender == name:
            beside.offered[name] = drafts
        elif len(beside.models) > 1 and not drafts and beside.leads.main.ended:  # it cannot draft, whatever it is asked
            self.judge.verdict(beside.record, name, 0, 1)


def _same(own: Any, sequence: ModelSequence) -> Any:
    """Another drafter's sequence of the same request."""
    own.sampling, own.num_speculative_tokens = sequence.sampling, sequence.num_speculative_tokens
    own.text, own.is_open = list(sequence.text), True
    return own
