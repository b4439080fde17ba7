"""Drafts with a smaller model. Imports neither vLLM, Ray nor torch.

Every step is one batch over the sequences that wait for an answer, and over what is drafted ahead for the others while
their targets verify. Prefill runs in bounded chunks between steps. A commit that matches what has been drafted ahead is
answered at once with what is there, whatever step runs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.actors.drafter.engine import Engine
from outrider.actors.drafter.model_sequence import NUM_ALTERNATIVES, ModelSequence
from outrider.actors.drafter.outcomes import OutcomeModel, StepCost
from outrider.actors.drafter.planner import DraftStep, LookaheadLimits, StepPlanner
from outrider.actors.drafter.proposer import Outbox, SequenceKey, Work
from outrider.actors.drafter.vocabulary import DraftVocabulary
from outrider.actors.observability.histogram import Histogram
from outrider.cluster.link.messages import Commit, DraftOrigin, PrefetchedProposal, Proposals, ProposalStatus

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_PREFILLS = 4
"""While sequences wait for answers, one chunk of prefill is run after this many steps."""


Swap = Callable[[Callable[[Mapping[str, Any]], None]], None]
"""Called with a function that loads tensors of the model by the checkpoint's names. What it raises ends the drafter."""


@dataclass(eq=False, slots=True)
class WeightsChange:
    """Loads another version of the model's tensors."""

    is_step: ClassVar[bool] = False
    engine: Engine
    swap: Swap

    def execute(self) -> None:
        self.swap(self.engine.load_weights)


class DraftModelProposer:
    """Implements Proposer with a draft model."""

    def __init__(
        self,
        engine: Engine,
        prefill_chunk_tokens: int,
        limits: LookaheadLimits,
        vocabulary: DraftVocabulary | None = None,
        clock: Callable[[], float] = time.perf_counter,
        one_pass: bool = False,
    ) -> None:
        """vocabulary: the tokens that the engine's output head is cut to; None: it is whole. one_pass: the model drafts
        all tokens of a round after one row, after masks."""
        self._prefill_chunk_tokens, self._one_pass = prefill_chunk_tokens, one_pass
        self.outbox = Outbox()
        self._vocabulary = vocabulary
        self._num_drawable: int | None = None
        """Ids from there on are not drawn: the smallest target that was ever linked has no such token."""

        self._engine = engine
        self._limits = limits
        self._sequences: dict[ModelSequence, None] = {}
        """The open ones, the oldest first."""

        self._turns = itertools.count(1)
        self._gone: list[ModelSequence] = []
        """Sequences that are gone. A step may use their blocks, so these are freed before the next one is planned."""

        self._outcomes = OutcomeModel(NUM_ALTERNATIVES)
        self._cost = StepCost()
        self._planner = StepPlanner(
            engine,
            self._sequences.keys(),
            self._limits,
            prefill_chunk_tokens,
            self._outcomes,
            self._cost,
            self.outbox,
            clock,
        )
        self.sends_ahead = True
        """Drafts are sent for outcomes that have not come yet. False where each commit decides whose drafts answer."""

        self._swap: Swap | None = None
        """Loads the version that is to draft, where it does not draft yet."""

        self._steps_since_prefill = 0
        self._saw_bad_logits = False
        self._step_times = Histogram()

    def scratch(self) -> DraftModelProposer:
        """Returns a proposer on the same engine to warm it up with. This one observes nothing of what it does."""
        scratch = DraftModelProposer(self._engine, self._prefill_chunk_tokens, self._limits, one_pass=self._one_pass)
        scratch._num_drawable = self._num_drawable
        return scratch

    def new_sequence(self, key: SequenceKey) -> ModelSequence:
        return ModelSequence(key, self._one_pass)

    def open(self, sequence: ModelSequence) -> None:
        text = sequence.text
        link_id, handle = sequence.key
        sequence.begin(f"{link_id}-{handle}", self._engine.max_model_len)
        self._sequences[sequence] = None
        if self._vocabulary is not None:
            self._vocabulary.use(dict.fromkeys(text))
        if len(text) >= sequence.max_len:
            sequence.retired = True
            return
        sequence.main.num_computed = self._engine.start(sequence.engine_id, text, sequence.sampling)
        sequence.appended_to = len(text)
        self._announce(sequence)

    def commit(
        self, sequence: ModelSequence, commit: Commit, look_up: Callable[[], list[int] | None] | None = None
    ) -> None:
        """See Proposer.

        Args:
            look_up: called when the sequence has the commit and can be drafted for. It returns a look-up's drafts,
                which are the answer then and from which the model drafts ahead; None: the model's drafts are.
        """
        was_due, base = sequence.due, sequence.committed_len
        if was_due and sequence.can_draft:
            self.outbox.add(sequence, sequence.drafts([], origin=DraftOrigin.NONE))
        if sequence.num_proposed is not None:
            drawn = [sequence.main.at(base + index) for index in range(sequence.num_proposed + 1)]
            self._outcomes.observe(drawn, commit.token_ids)
        if self._vocabulary is not None:
            self._vocabulary.observe(commit.token_ids)
        sequence.commit(commit)
        if sequence.committed_len >= sequence.max_len:
            self._retire(sequence)
        if commit.num_wanted == 0:
            return
        if commit.has_drafts:
            sequence.answered(commit.num_wanted)
            return
        if not was_due:  # else it keeps its place
            sequence.turn = next(self._turns)
        if (answer := self._answer(sequence, look_up)) is not None:
            self.outbox.add(sequence, answer)

    def _answer(self, sequence: ModelSequence, look_up: Callable[[], list[int] | None] | None) -> Proposals | None:
        """Returns the answer to the last commit; None: a step must draft it."""
        if sequence.retired:
            return sequence.give_up(ProposalStatus.LENGTH)
        if not sequence.can_draft:
            sequence.announced = False
            if sequence.lacks_room:
                return sequence.give_up(ProposalStatus.OUT_OF_KV)
            return sequence.no_drafts(ProposalStatus.NOT_READY)
        if look_up is not None and (drafts := look_up()):
            return sequence.propose(drafts)
        return sequence.answer(self._outcomes)

    def close(self, sequence: ModelSequence) -> None:
        del self._sequences[sequence]
        self._retire(sequence)

    def limit_vocabulary(self, size: int) -> None:
        if self._num_drawable is not None and size >= self._num_drawable:
            return
        if self._vocabulary is not None:
            self._vocabulary.limit(size)
        self._num_drawable = size

    def change_weights(self, swap: Swap) -> None:
        """Drafts with what `swap` loads from the next step on; it replaces a swap that has not begun.

        Sequences keep the KV that they have: their drafts may be a little worse until they end, and each is verified.
        """
        self._swap = swap

    def plan(self) -> Work | None:
        self._release()
        if self._swap is not None:
            change, self._swap = WeightsChange(self._engine, self._swap), None
            return change
        due = [sequence for sequence in self._sequences if sequence.due and sequence.can_draft]
        due.sort(key=lambda sequence: sequence.turn)  # with more of them than rows, nobody waits for ever
        # Sequences that wait come first, but a prompt must not wait for ever; and what is drafted ahead takes turns
        # with prompts.
        prefill_first = self._steps_since_prefill >= _STEPS_BETWEEN_PREFILLS if due else self._steps_since_prefill > 0
        planner = self._planner
        step = planner.prefill() if prefill_first else None
        if step is None:
            step = planner.drafts(due) or planner.prefill() or planner.prefill(idle=True)
        if step is not None:
            drafting = any(row.draws for row in step.plan.rows)
            self._steps_since_prefill = self._steps_since_prefill + 1 if drafting else 0
            step.plan.num_drawable = self._num_drawable
            if self._vocabulary is not None:
                step.plan.vocabulary_changes = self._vocabulary.take_changes()
        return step

    def complete(self, work: Work) -> None:
        """Appends what a step has drawn, and sends the answers and prefetched proposals that this completes."""
        if not isinstance(work, DraftStep):
            return
        prefetched: list[tuple[ModelSequence, PrefetchedProposal]] = []
        for row, (sequence, chain), drawn in zip(work.plan.rows, work.targets, work.drawn, strict=True):
            if sequence not in self._sequences:  # closed meanwhile
                continue
            if chain is None:
                sequence.main.num_computed = max(sequence.main.num_computed, row.start + len(row.token_ids))
                self._announce(sequence)
                continue
            if any(one.bad_logits for one in drawn) and not self._saw_bad_logits:
                self._saw_bad_logits = True
                problem = "sequence %s: the draft model's logits are not finite: drafts end there"
                logger.warning(problem, sequence.key, extra=sequence.about())
            if not sequence.drew(chain, row.draws, drawn):
                continue
            answer = sequence.answer(self._outcomes) if chain is sequence.main else None
            if answer is not None:
                self.outbox.add(sequence, answer)
            elif self.sends_ahead and (proposal := sequence.prefetched(chain)) is not None:
                prefetched.append((sequence, proposal))
        for sequence, proposal in prefetched:  # after the answers, which targets wait for
            self.outbox.add(sequence, proposal)
        if any(work.drawn):
            self._cost.observe(len(work.plan.rows), work.seconds)
            self._step_times.observe(work.seconds)

    def step_us(self) -> int:
        """Returns what a step takes, microseconds. With parallel drafting, the step time is divided by the largest
        num_wanted, because the length controller multiplies it by k_miss."""
        drafts = max((s.num_wanted for s in self._sequences), default=1) if self._one_pass else 1
        return int(self._cost.mean_s * 1e6 / max(drafts, 1))

    def usage(self) -> dict[str, float]:
        return {
            "num_sequences": len(self._sequences),
            "num_prefilling": sum(not (s.can_draft or s.retired) for s in self._sequences),
            "num_side_branches": sum(len(s.sides) for s in self._sequences),
            "branch_blocks": self._planner.branches.num_blocks,
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    def counters(self) -> dict[str, Any]:
        counted: dict[str, Any] = {"step_seconds": self._step_times.snapshot()}
        if self._vocabulary is not None:
            counted["vocabulary_observed"] = self._vocabulary.num_observed
            counted["vocabulary_missed"] = self._vocabulary.num_missed
        return counted

    def _announce(self, sequence: ModelSequence) -> None:
        """Sends READY once, when the sequence can be drafted for."""
        if sequence.can_draft and not sequence.announced:
            sequence.announced = True
            self.outbox.add(sequence, sequence.no_drafts(ProposalStatus.READY))

    def _retire(self, sequence: ModelSequence) -> None:
        if not sequence.retired:
            self._gone.append(sequence)
        sequence.retired = True

    def _release(self) -> None:
        """Frees what no step uses any more. No step runs now."""
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
