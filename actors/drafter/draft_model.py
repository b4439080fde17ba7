"""Drafting with a smaller model: every step is one batch over the sequences that wait for an answer, and over what is
drafted ahead for the others while their targets verify. Prefill runs in bounded chunks between steps. Pure."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from outrider.actors.drafter.engine import Engine
from outrider.actors.drafter.ngram import GrowingText, Reading
from outrider.actors.drafter.planner import DraftStep, LookaheadLimits, OutcomeModel, StepCost, StepPlanner
from outrider.actors.drafter.sequence import NUM_ALTERNATIVES, DraftSequence, Resident
from outrider.actors.drafter.strategy import Draft, SequenceKey, UnknownSequence, Work
from outrider.actors.drafter.vocabulary import DraftVocabulary
from outrider.actors.observability.histogram import Histogram
from outrider.actors.observability.sequence_names import NAMES
from outrider.cluster.link.messages import Commit, DraftSampling, ProposalStatus

logger = logging.getLogger(__name__)

_STEPS_BETWEEN_PREFILLS = 4
"""While sequences wait for answers, prefill still gets one chunk per this many steps."""


class DraftModelStrategy:
    """Implements DraftStrategy."""

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
        self._engine = engine
        self._limits = limits or LookaheadLimits()
        self._residents: dict[SequenceKey, Resident] = {}
        self._commits = 0
        self._lives = itertools.count()
        """A sequence that is opened again may meet its former life's blocks, which are freed later."""

        self._unread: dict[SequenceKey, GrowingText] = {}
        """Texts that are not read whole: no guesses from them yet."""

        self._read_last = False
        self._closed: list[Resident] = []
        """Gone while a step ran: their blocks are freed before the next one is planned."""

        self._outcomes = OutcomeModel(NUM_ALTERNATIVES)
        self._cost = StepCost()
        self._planner = StepPlanner(
            engine, self._residents.values(), self._limits, prefill_chunk_tokens, self._outcomes, self._cost, clock
        )
        self._steps_since_prefill = 0
        self._saw_bad_logits = False
        self.guesses_right = 0
        self._step_times = Histogram()

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> Draft | None:
        self.close(key)
        limit = self._engine.max_model_len
        sequence = DraftSequence(key, list(token_ids), num_speculative_tokens, sampling, limit)
        resident = Resident(sequence, f"{key[0]}-{key[1]}-{next(self._lives)}")
        if self._limits.prompt_lookup_max:
            lookup = self._limits
            resident.index = GrowingText(token_ids, lookup.prompt_lookup_min, lookup.prompt_lookup_max)
            if not resident.index.is_read:
                self._unread[key] = resident.index
        if self._vocabulary is not None:
            self._vocabulary.pin(resident.request_id, token_ids)
        if len(token_ids) >= limit:
            resident.retired = True
        else:
            sequence.main.num_computed = self._engine.start(resident.request_id, token_ids)
            resident.appended_to = len(token_ids)
        self._residents[key] = resident
        return self._announce(resident)

    def commit(self, key: SequenceKey, commit: Commit) -> list[Draft]:
        resident = self._residents.get(key)
        if resident is None:
            raise UnknownSequence(key)
        sequence = resident.sequence
        base = sequence.committed_len
        overtaken = sequence.due
        answers = [Draft(key, base, [], ProposalStatus.OK)] if overtaken and resident.can_draft else []
        if commit.base_committed_len == base and sequence.sent is not None:
            drawn = [sequence.main.at(base + index) for index in range(sequence.sent + 1)]
            self._outcomes.observe(drawn, commit.token_ids)
        if self._vocabulary is not None:
            self._vocabulary.observe(commit.token_ids)
        if resident.index is not None and commit.base_committed_len == base:
            resident.index.append(commit.token_ids)
        sequence.commit(commit.base_committed_len, commit.token_ids, commit.num_wanted, commit.num_on_miss)
        if commit.num_wanted == 0:
            return answers
        if not overtaken:  # else it keeps its place
            self._commits += 1
            resident.asked = self._commits
        if not resident.retired and sequence.committed_len >= sequence.max_len:
            self._retire(resident)
        if resident.retired:
            sequence.answer()
            return [*answers, Draft(key, sequence.committed_len, [], ProposalStatus.LENGTH)]
        if not resident.can_draft:
            resident.announced = False
            return [*answers, Draft(key, sequence.committed_len, [], ProposalStatus.NOT_READY)]
        answer = sequence.answer()
        return answers if answer is None else [*answers, answer]

    def close(self, key: SequenceKey) -> None:
        self._unread.pop(key, None)
        resident = self._residents.pop(key, None)
        if resident is not None:
            if self._vocabulary is not None:
                self._vocabulary.unpin(resident.request_id)
            self._retire(resident)

    def plan(self) -> tuple[Work | None, list[Draft]]:
        self._release()
        if self._unread and not self._read_last:
            return self._reading(), []
        self._read_last = False
        answers: list[Draft] = []
        due = [r for r in self._residents.values() if r.sequence.due and r.can_draft]
        due.sort(key=lambda resident: resident.asked)  # with more of them than rows, nobody waits for ever
        # Who waits for an answer comes first, but a prompt must not wait for ever; and what is drafted ahead shares
        # the rest with prompts by turns.
        prefill_first = self._steps_since_prefill >= _STEPS_BETWEEN_PREFILLS if due else self._steps_since_prefill > 0
        planner = self._planner
        step = planner.prefill() if prefill_first else None
        if step is None:
            step = planner.drafts(due, answers) or planner.prefill() or planner.prefill(idle=True)
        if step is not None:
            drafting = any(row.draws for row in step.plan.rows)
            self._steps_since_prefill = self._steps_since_prefill + 1 if drafting else 0
            if self._vocabulary is not None:
                step.plan.vocabulary_changes = self._vocabulary.take_changes()
        elif self._unread:
            return self._reading(), answers
        return step, answers

    def complete(self, work: Work) -> list[Draft]:
        if isinstance(work, Reading):
            if self._unread.get(work.key) is work.text and work.text.settle():
                del self._unread[work.key]
            return []
        assert isinstance(work, DraftStep)
        answers: list[Draft] = []
        drafting = False
        for row, (resident, line), drawn in zip(work.plan.rows, work.targets, work.drawn, strict=True):
            sequence = resident.sequence
            if self._residents.get(sequence.key) is not resident:
                continue
            if line is None:
                answers += self._prefilled(resident, row.start + row.num_fed)
                continue
            drafting = True
            self.guesses_right += len(drawn) - 1
            if any(token.bad_logits for token in drawn) and not self._saw_bad_logits:
                self._saw_bad_logits = True
                problem = "sequence %s: the draft model's logits are not finite: drafts end there"
                logger.warning(problem, sequence.key, extra=NAMES.about(sequence.key))
            if sequence.drew(line, row.draws, drawn):
                answer = sequence.answer() if line is sequence.main else None
                if answer is not None:
                    answers.append(answer)
        if drafting:
            self._cost.observe(len(work.plan.rows), work.seconds)
            self._step_times.observe(work.seconds)
        return answers

    def step_us(self) -> int:
        return int(self._cost.mean_s * 1e6)

    def usage(self) -> dict[str, float]:
        residents = list(self._residents.values())
        return {
            "num_sequences": len(residents),
            "num_prefilling": sum(not (r.can_draft or r.retired) for r in residents),
            "num_side_branches": sum(len(r.sequence.sides) for r in residents),
            "branch_blocks": self._planner.branches.num_blocks,
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    def counters(self) -> dict[str, Any]:
        counted: dict[str, Any] = {"guesses_right": self.guesses_right, "step_seconds": self._step_times.snapshot()}
        if self._vocabulary is not None:
            counted["vocabulary_observed"] = self._vocabulary.num_observed
            counted["vocabulary_missed"] = self._vocabulary.num_missed
        return counted

    def _reading(self) -> Reading:
        """Steps and texts take turns: a piece of text is far shorter than a step."""
        self._read_last = True
        return Reading(*next(iter(self._unread.items())))

    def _prefilled(self, resident: Resident, num_computed: int) -> list[Draft]:
        main = resident.sequence.main
        main.num_computed = max(main.num_computed, num_computed)
        ready = self._announce(resident)
        return [] if ready is None else [ready]

    def _announce(self, resident: Resident) -> Draft | None:
        sequence = resident.sequence
        if resident.announced or not resident.can_draft:
            return None
        resident.announced = True
        return Draft(sequence.key, sequence.committed_len, [], ProposalStatus.READY)

    def _retire(self, resident: Resident) -> None:
        if not resident.retired:
            resident.retired = True
            self._closed.append(resident)

    def _release(self) -> None:
        """Free what no step uses any more. No step runs now."""
        for resident in self._residents.values():
            self._free_dropped(resident.sequence)
        for resident in self._closed:
            sequence = resident.sequence
            sequence.drop_everything()
            self._free_dropped(sequence)
            self._engine.finish(resident.request_id)
        self._closed.clear()

    def _free_dropped(self, sequence: DraftSequence) -> None:
        for side in sequence.dropped:
            self._planner.branches.free(side)
        sequence.dropped.clear()
