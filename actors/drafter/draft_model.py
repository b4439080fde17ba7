"""Drafting with a smaller model: every step is one batch over the sequences that wait for an answer, and over what is
drafted ahead for the others while their targets verify. Prefill runs in bounded chunks between steps. Pure."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.actors.drafter.engine import Engine
from outrider.actors.drafter.link_shares import LinkShares
from outrider.actors.drafter.model_sequence import NUM_ALTERNATIVES, ModelSequence
from outrider.actors.drafter.outcomes import OutcomeModel, StepCost
from outrider.actors.drafter.pause import Pause, Pauses
from outrider.actors.drafter.planner import DraftStep, LookaheadLimits, StepPlanner
from outrider.actors.drafter.proposer import S, Work
from outrider.actors.drafter.sequence import Answer, Foreseen, SequenceKey
from outrider.actors.drafter.vocabulary import DraftVocabulary
from outrider.actors.observability.histogram import Histogram
from outrider.cluster.link.messages import Commit, DraftOrigin, ProposalStatus

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_PREFILLS = 4
"""While sequences wait for answers, prefill still gets one chunk per this many steps."""

_WAIT_PRICE = 2.0
"""What a target's time is worth beside the tokens that it would bring: the drafter gets no further ahead in it."""

_MANY = 8
"""In a batch of more nobody waits: for some of them there is always another draft to wait for."""

_AT_ONCE = 2048
"""Tokens of a prompt that are hashed, or taken into the draft vocabulary, while others wait: about a millisecond."""


@dataclass(eq=False, slots=True)
class Hashing:
    """Work: a long prompt for the engine, which then starts it."""

    is_step: ClassVar[bool] = False
    engine: Engine
    sequence: ModelSequence
    prompt: list[int]
    hashed: Any = None

    def execute(self) -> None:
        self.hashed = self.engine.hashed(self.sequence.engine_id, self.prompt, self.sequence.sampling)


Swap = Callable[[Callable[[Mapping[str, Any]], None]], None]
"""Told how to load tensors of the model's, by the checkpoint's names. What it raises ends the drafter."""


@dataclass(eq=False, slots=True)
class WeightsChange:
    """Work: another version of the model's tensors."""

    is_step: ClassVar[bool] = False
    engine: Engine
    swap: Swap

    def execute(self) -> None:
        self.swap(self.engine.load_weights)


class DraftModelProposer:
    """Implements Proposer."""

    def __init__(
        self,
        engine: Engine,
        prefill_chunk_tokens: int,
        limits: LookaheadLimits | None = None,
        vocabulary: DraftVocabulary | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """vocabulary: of the engine's cut output head; None: it is whole."""
        self._vocabulary = vocabulary
        self._num_drawable: int | None = None
        """Ids from there on are not drawn: the smallest of the targets that were ever linked has no such token."""

        self._engine = engine
        self._limits = limits or LookaheadLimits()
        self._sequences: dict[ModelSequence, None] = {}
        """Those that are open, the oldest first."""

        self._turns = itertools.count(1)
        self._lives = itertools.count()
        """A sequence that is opened again may meet its former life's blocks, which are freed later."""

        self._hashed_last = False
        self._hashed_of = self._pinned_of = 0
        """Links that had the last turn: at hashing, and with the vocabulary."""

        self._unstarted: dict[ModelSequence, None] = {}
        """Long prompts that the engine does not know yet."""

        self._unpinned: dict[ModelSequence, list[int]] = {}
        """Prompts whose tokens the vocabulary holds in part."""

        self._gone: list[ModelSequence] = []
        """Since when a step ran: their blocks are freed before the next one is planned."""

        self._outcomes = OutcomeModel(NUM_ALTERNATIVES)
        self._cost = StepCost()
        self._shares = LinkShares()
        self._pauses = Pauses(clock)
        self._planner = StepPlanner(
            engine,
            self._sequences.keys(),
            self._limits,
            prefill_chunk_tokens,
            self._outcomes,
            self._cost,
            self._shares,
            clock,
        )
        self._clock = clock
        self._running: DraftStep | None = None
        self._waiting: list[ModelSequence] = []
        """For their answers, since the messages that are being taken."""

        self._has_taken: int | None = None
        """The link whose messages are being taken, if it needs no answer to some of them."""

        self._foreseen: list[Foreseen] = []
        """Of the last step."""

        self._swap: Swap | None = None
        """To the version that is to draft, where it does not yet."""

        self._steps_since_prefill = 0
        self._saw_bad_logits = False
        self._step_times = Histogram()

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return ModelSequence(key)

    def open(self, sequence: ModelSequence) -> list[Answer]:
        text = sequence.text
        link_id, handle = sequence.key
        sequence.begin(f"{link_id}-{handle}-{next(self._lives)}", self._engine.max_model_len)
        self._sequences[sequence] = None
        self._shares.opened(link_id)
        self._pauses.end()
        if self._vocabulary is not None:
            self._vocabulary.pin(sequence.engine_id, text[:_AT_ONCE])
            if len(text) > _AT_ONCE:
                self._unpinned[sequence] = text[_AT_ONCE:]
        if len(text) >= sequence.max_len:
            sequence.retired = True
        elif len(text) > _AT_ONCE:
            self._unstarted[sequence] = None
        else:
            return self._started(sequence, text, self._engine.hashed(sequence.engine_id, text, sequence.sampling))
        return []

    def commit(
        self, sequence: ModelSequence, commit: Commit, instead: Callable[[], list[int] | None] | None = None
    ) -> list[Answer]:
        """instead: asked when the sequence has the commit and could be drafted for: drafts of somebody else's to answer
        with, from which the model then drafts ahead; None: the model's own."""
        self._pauses.asked(sequence.key[0])
        overtaken, base = sequence.due, sequence.committed_len
        answers = [sequence.drafts([], origin=DraftOrigin.NONE)] if overtaken and sequence.can_draft else []
        if sequence.sent is not None:
            drawn = [sequence.main.at(base + index) for index in range(sequence.sent + 1)]
            self._outcomes.observe(drawn, commit.token_ids)
            right, looked_at = verified(sequence.main.ids(base, base + sequence.sent), commit.token_ids)
            self._shares.verified(sequence.key[0], right, looked_at)
        if self._vocabulary is not None:
            self._vocabulary.observe(commit.token_ids)
        sequence.commit(commit)
        sequence.timed(len(commit.token_ids), self._clock())
        if sequence.committed_len >= sequence.max_len:
            self._retire(sequence)
        if commit.num_wanted == 0:
            return answers
        if commit.has_drafts:
            sequence.take(commit.num_wanted)
            self._has_taken = sequence.key[0]
            return answers
        if not overtaken:  # else it keeps its place
            sequence.turn = next(self._turns)
        if sequence.retired:
            return [*answers, sequence.give_up(ProposalStatus.LENGTH)]
        if not sequence.can_draft:
            sequence.announced = False
            if sequence.lacks_room:
                return [*answers, sequence.give_up(ProposalStatus.OUT_OF_KV)]
            return [*answers, sequence.no_drafts(ProposalStatus.NOT_READY)]
        if instead is not None and (drafts := instead()):
            return [*answers, sequence.propose(drafts)]
        self._waiting.append(sequence)
        return answers

    def delivered(self) -> list[Answer]:
        """What is at hand goes out, but for what `_held` keeps back."""
        waiting, self._waiting = self._waiting, []
        taken, self._has_taken = self._has_taken, None
        held = self._held(waiting)
        answers = [answer for sequence in waiting if sequence not in held and (answer := sequence.answer()) is not None]
        link_id = waiting[0].key[0] if waiting else taken
        if link_id is not None:
            self._pauses.looked(link_id, missed=len(answers) < len(waiting))
        if taken is not None:
            self._pauses.answered(taken)
        return self._sent(answers)

    def _sent(self, answers: list[Answer]) -> list[Answer]:
        for answer in answers:
            self._pauses.answered(answer.sequence.key[0])
        return answers

    def _held(self, waiting: Collection[ModelSequence]) -> Collection[ModelSequence]:
        """All that get one draft more of the step that runs, when that is soon enough for what it brings, since a
        target waits for all of its answers; else nobody. Depends on nothing that this step draws. waiting: of one
        target."""
        step = self._running
        if step is None or len(waiting) > _MANY or not all(sequence.tokens_per_s for sequence in waiting):
            return ()
        soon = {sequence for sequence in waiting if sequence.due and _is_drafting(step, sequence)}
        # Late by some time it is expected to take as long again.
        left_s = abs(step.started + self._cost.expected_s(len(step.plan.rows)) - self._clock())
        missed = left_s * sum(sequence.tokens_per_s for sequence in waiting)
        brought = sum(self._outcomes.usual_acceptance ** (sequence.num_drafted + 1) for sequence in soon)
        return soon if missed * _WAIT_PRICE < brought else ()

    def close(self, sequence: ModelSequence) -> None:
        del self._sequences[sequence]
        self._shares.closed(sequence.key[0])
        self._unpinned.pop(sequence, None)
        if self._vocabulary is not None:
            self._vocabulary.unpin(sequence.engine_id)
        self._foreseen = [each for each in self._foreseen if each.sequence is not sequence]
        self._retire(sequence)

    def unlink(self, link_id: int) -> None:
        self._shares.unlink(link_id)
        self._pauses.unlink(link_id)

    def limit_vocabulary(self, size: int) -> None:
        if self._num_drawable is not None and size >= self._num_drawable:
            return
        if self._vocabulary is not None:
            self._vocabulary.limit(size)
        self._num_drawable = size

    def change_weights(self, swap: Swap) -> None:
        """From the next step on, draft with what this loads; it takes the place of one that has not begun. Sequences
        keep the KV that they have: their drafts may be a little worse until they end, and every one is verified."""
        self._swap = swap

    def forget_step_times(self) -> None:
        """What the first steps took, which set up what is set up lazily."""
        self._cost.forget()
        self._step_times = Histogram()

    def plan(self) -> tuple[Work | None, list[Answer]]:
        self._release()
        if self._swap is not None:
            change, self._swap = WeightsChange(self._engine, self._swap), None
            return change, []
        self._pin_more()
        if not self._hashed_last and (hashing := self._hashing()) is not None:
            return hashing, []
        self._hashed_last = False
        answers: list[Answer] = []
        due = [sequence for sequence in self._sequences if sequence.due and sequence.can_draft]
        due.sort(key=lambda sequence: sequence.turn)  # with more of them than rows, nobody waits for ever
        # Who waits for an answer comes first, but a prompt must not wait for ever; and what is drafted ahead shares
        # the rest with prompts by turns.
        prefill_first = self._steps_since_prefill >= _STEPS_BETWEEN_PREFILLS if due else self._steps_since_prefill > 0
        planner = self._planner
        is_ahead = not due and all(s.can_draft or s.retired for s in self._sequences)
        if is_ahead and (pause := self._pauses.next(self._cost.mean_s, self._sequences)) is not None:
            return pause, answers
        step = planner.prefill() if prefill_first else None
        if step is None:
            step = planner.drafts(due, answers) or planner.prefill() or planner.prefill(idle=True)
        if step is not None:
            drafting = any(row.draw is not None for row in step.plan.rows)
            self._steps_since_prefill = self._steps_since_prefill + 1 if drafting else 0
            if is_ahead:
                self._pauses.stepped(step.worth)
            step.plan.num_drawable = self._num_drawable
            if self._vocabulary is not None:
                step.plan.vocabulary_changes = self._vocabulary.take_changes()
        self._running = step
        return step or self._hashing(), answers

    def complete(self, work: Work) -> list[Answer]:
        if isinstance(work, Hashing):
            if work.sequence not in self._unstarted:  # closed, or grown too long meanwhile
                return []
            del self._unstarted[work.sequence]
            return self._started(work.sequence, work.prompt, work.hashed)
        if isinstance(work, WeightsChange):
            return []
        if isinstance(work, Pause):
            self._pauses.complete(work)
            return []
        assert isinstance(work, DraftStep)
        self._running = None
        self._foreseen = []
        answers: list[Answer] = []
        drafting = False
        for row, (sequence, line), drawn in zip(work.plan.rows, work.targets, work.drawn, strict=True):
            if sequence not in self._sequences:  # closed meanwhile
                continue
            if line is None:
                sequence.main.num_computed = max(sequence.main.num_computed, row.start + len(row.token_ids))
                answers += self._announced(sequence)
                continue
            assert row.draw is not None
            assert drawn is not None
            drafting = True
            if drawn.bad_logits and not self._saw_bad_logits:
                self._saw_bad_logits = True
                problem = "sequence %s: the draft model's logits are not finite: drafts end there"
                logger.warning(problem, sequence.key, extra=sequence.about())
            if sequence.drew(line, row.draw, drawn):
                answer = sequence.answer() if line is sequence.main else None
                if answer is not None:
                    answers.append(answer)
                elif (ahead := sequence.ahead(line)) is not None:
                    self._foreseen.append(Foreseen(sequence, ahead))
        if drafting:
            self._cost.observe(len(work.plan.rows), work.seconds)
            self._step_times.observe(work.seconds)
        return self._sent(answers)

    def foreseen(self) -> list[Foreseen]:
        foreseen, self._foreseen = self._foreseen, []
        return foreseen

    def step_us(self) -> int:
        return int(self._cost.mean_s * 1e6)

    def usage(self) -> dict[str, float]:
        return {
            "num_sequences": len(self._sequences),
            "num_prefilling": sum(not (s.can_draft or s.retired) for s in self._sequences),
            "num_side_branches": sum(len(s.sides) for s in self._sequences),
            "branch_blocks": self._planner.branches.num_blocks,
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    def counters(self) -> dict[str, Any]:
        counted: dict[str, Any] = {
            "step_seconds": self._step_times.snapshot(),
            "link_steps": self._shares.steps(),
        }
        if self._vocabulary is not None:
            counted["vocabulary_observed"] = self._vocabulary.num_observed
            counted["vocabulary_missed"] = self._vocabulary.num_missed
        return counted

    def _hashing(self) -> Hashing | None:
        """What is to be done for prompts beside steps, which it takes turns with: it is far shorter."""
        self._hashed_last = bool(self._unstarted)
        if not self._hashed_last:
            return None
        sequence = _oldest_of_next_link(self._unstarted, self._hashed_of)
        self._hashed_of = sequence.key[0]
        return Hashing(self._engine, sequence, list(sequence.text))

    def _pin_more(self) -> None:
        """The next slice of a prompt that the vocabulary does not hold all of."""
        if not self._unpinned:
            return
        sequence = _oldest_of_next_link(self._unpinned, self._pinned_of)
        self._pinned_of, rest = sequence.key[0], self._unpinned[sequence]
        assert self._vocabulary is not None
        self._vocabulary.pin_more(sequence.engine_id, rest[:_AT_ONCE])
        del rest[:_AT_ONCE]
        if not rest:
            del self._unpinned[sequence]

    def _started(self, sequence: ModelSequence, prompt: list[int], hashed: Any) -> list[Answer]:
        sequence.main.num_computed = self._engine.start(sequence.engine_id, prompt, hashed)
        sequence.started, sequence.appended_to = True, len(prompt)
        return self._announced(sequence)

    def _announced(self, sequence: ModelSequence) -> list[Answer]:
        if sequence.announced or not sequence.can_draft:
            return []
        sequence.announced = True
        return [sequence.no_drafts(ProposalStatus.READY)]

    def _retire(self, sequence: ModelSequence) -> None:
        self._unstarted.pop(sequence, None)
        if sequence.started and not sequence.retired:
            self._gone.append(sequence)
        sequence.retired = True

    def _release(self) -> None:
        """Free what no step uses any more. No step runs now."""
        for sequence in self._sequences:
            self._free_dropped(sequence)
        for sequence in self._gone:
            sequence.drop_everything()
            self._free_dropped(sequence)
            self._engine.finish(sequence.engine_id)
        self._gone.clear()

    def _free_dropped(self, sequence: ModelSequence) -> None:
        for side in sequence.dropped:
            self._planner.branches.free(side)
        sequence.dropped.clear()


def _is_drafting(step: DraftStep, sequence: ModelSequence) -> bool:
    """Whether the step brings a draft more than the sequence has, and it has use for one."""
    draw = step.draws.get(sequence.main)
    return draw is not None and sequence.num_drafted < sequence.num_wanted and draw == sequence.next_draw(sequence.main)


def _oldest_of_next_link(waiting: Collection[S], last_link_id: int) -> S:
    """Links take turns; each has its oldest sequence served."""
    return min(waiting, key=lambda sequence: (sequence.key[0] <= last_link_id, sequence.key[0]))


def verified(drafts: Iterable[int], token_ids: Iterable[int]) -> tuple[int, int]:
    """How many of the drafts the target took, and how many it looked at: up to the first that it did not."""
    right = looked_at = 0
    for draft, token in zip(drafts, token_ids, strict=False):
        looked_at += 1
        if draft != token:
            break
        right += 1
    return right, looked_at
