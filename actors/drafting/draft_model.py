"""Drafting with a smaller model: every step is one batch over the sequences that wait for an answer, and over what is
drafted ahead for the others while their targets verify. Prefill runs in bounded chunks between steps. Pure."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.drafting.branch_blocks import BranchBlocks
from actors.drafting.draft_vocabulary import DraftVocabulary
from actors.drafting.engine import Engine
from actors.drafting.line import Drawn, Line
from actors.drafting.ngram import NgramIndex
from actors.drafting.outcomes import Outcome, OutcomeModel
from actors.drafting.sequence import NUM_ALTERNATIVES, DraftSequence, SideBranch
from actors.drafting.step_cost import StepCost
from actors.drafting.step_plan import Draw, StepPlan, StepRow
from actors.drafting.strategy import Draft, SequenceKey, UnknownSequence
from actors.messages import Commit, DraftSampling, ProposalStatus

if TYPE_CHECKING:
    from actors.drafting.strategy import Work

logger = logging.getLogger(__name__)

_CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""

_STEPS_BETWEEN_PREFILLS = 4
"""While sequences wait for answers, prefill still gets one chunk per this many steps."""


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """ahead: draft for the next round while this one is verified. max_side_branches: of one sequence. max_rows: of one
    step, all sequences together. prompt_lookup_min, prompt_lookup_max: n-grams that are looked up to guess draws, 0 for
    none; max_guesses: of one row."""

    ahead: bool = True
    max_side_branches: int = 8
    max_rows: int = 64
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    max_guesses: int = 8


@dataclass(eq=False, slots=True)
class _Resident:
    """A sequence, and what the engine holds of it."""

    sequence: DraftSequence
    request_id: str
    retired: bool = False
    """Too long for the draft model: followed, so that commits stay known, but no longer in the engine."""

    appended_to: int = 0
    """Leading text tokens that the engine knows."""

    index: NgramIndex | None = None
    """Of the text, for guesses of draws."""

    asked: int = 0
    """Number of the commit that waits, or waited last."""

    announced: bool = False
    """READY has been sent, or need not be."""

    @property
    def can_draft(self) -> bool:
        sequence = self.sequence
        return not self.retired and sequence.committed_len - sequence.main.num_computed <= _CATCH_UP_TOKENS


@dataclass(eq=False, slots=True)
class DraftStep:
    """A planned step. targets: of each row the sequence and line it extends; None for a prefill chunk."""

    engine: Engine
    clock: Callable[[], float]
    plan: StepPlan = field(default_factory=StepPlan)
    targets: list[tuple[_Resident, Line | None]] = field(default_factory=list)
    drawn: list[list[Drawn]] = field(default_factory=list)
    seconds: float = 0.0

    def execute(self) -> None:
        started = self.clock()
        self.drawn = self.engine.run(self.plan)
        self.seconds = self.clock() - started


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
        self._engine, self._clock = engine, clock
        self._limits = limits or LookaheadLimits()
        self._chunk = min(prefill_chunk_tokens, engine.max_num_batched_tokens)
        self._max_rows = min(self._limits.max_rows, engine.max_num_batched_tokens)
        self._residents: dict[SequenceKey, _Resident] = {}
        self._branches = BranchBlocks(engine)
        self._commits = 0
        self._lives = itertools.count()
        """A sequence that is opened again may meet its former life's blocks, which are freed later."""

        self._closed: list[_Resident] = []
        """Gone while a step ran: their blocks are freed before the next one is planned."""

        self._outcomes = OutcomeModel(NUM_ALTERNATIVES)
        self._cost = StepCost()
        self._steps_since_prefill = 0
        self._saw_bad_logits = False
        self.rows_run = self.side_rows_run = self.guessed = self.guesses_right = 0

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> Draft | None:
        self.close(key)
        limit = self._engine.max_model_len
        sequence = DraftSequence(key, list(token_ids), num_speculative_tokens, sampling, limit)
        resident = _Resident(sequence, f"{key[0]}-{key[1]}-{next(self._lives)}")
        if self._limits.prompt_lookup_max:
            lookup = self._limits
            resident.index = NgramIndex(token_ids, lookup.prompt_lookup_min, lookup.prompt_lookup_max)
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
            resident.index.extend(commit.token_ids)
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
        resident = self._residents.pop(key, None)
        if resident is not None:
            if self._vocabulary is not None:
                self._vocabulary.unpin(resident.request_id)
            self._retire(resident)

    def plan(self) -> tuple[Work | None, list[Draft]]:
        self._release()
        answers: list[Draft] = []
        due = [r for r in self._residents.values() if r.sequence.due and r.can_draft and not r.retired]
        due.sort(key=lambda resident: resident.asked)  # with more of them than rows, nobody waits for ever
        # Who waits for an answer comes first, but a prompt must not wait for ever; and what is drafted ahead shares
        # the rest with prompts by turns.
        prefill_first = self._steps_since_prefill >= _STEPS_BETWEEN_PREFILLS if due else self._steps_since_prefill > 0
        step = self._prefill() if prefill_first else None
        if step is None:
            step = self._draft(due, answers) or self._prefill() or self._prefill(idle=True)
        return step, answers

    def _draft(self, due: list[_Resident], answers: list[Draft]) -> DraftStep | None:
        self._steps_since_prefill += 1
        step = DraftStep(self._engine, self._clock)
        for resident in due:
            self._add_main(step, resident, answers)
        if self._limits.ahead:
            self._add_ahead(step)
        if not step.plan.rows:
            return None
        step.plan.restores, step.plan.copies = self._branches.take_copies()
        if self._vocabulary is not None:
            step.plan.vocabulary_changes = self._vocabulary.take_changes()
        return step

    def complete(self, work: Work) -> list[Draft]:
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
            self.guessed += len(row.guesses)
            self.guesses_right += len(drawn) - 1
            if any(token.bad_logits for token in drawn) and not self._saw_bad_logits:
                self._saw_bad_logits = True
                logger.warning("sequence %s: the draft model's logits are not finite: drafts end there", sequence.key)
            if sequence.drew(line, row.draws, drawn):
                answer = sequence.answer() if line is sequence.main else None
                if answer is not None:
                    answers.append(answer)
        if drafting:
            self._cost.observe(len(work.plan.rows), work.seconds)
        return answers

    def step_us(self) -> int:
        return int(self._cost.mean_s * 1e6)

    def usage(self) -> dict[str, float]:
        residents = list(self._residents.values())
        return {
            "num_sequences": len(residents),
            "num_prefilling": sum(not (r.can_draft or r.retired) for r in residents),
            "num_side_branches": sum(len(r.sequence.sides) for r in residents),
            "branch_blocks": self._branches.num_blocks,
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    # Planning.

    def _add_main(self, step: DraftStep, resident: _Resident, answers: list[Draft] | None) -> None:
        """The main line's next row. answers: of a sequence that is due; OUT_OF_KV goes there."""
        sequence = resident.sequence
        draws, guesses = self._draws(resident, sequence.main)
        if not draws:
            answer = sequence.answer()
            if answer is not None and answers is not None:
                answers.append(answer)
            return
        if not self._has_room(step, sequence.num_uncomputed + len(guesses)):
            return
        if not self._allocate(resident, draws[-1].position):
            if answers is not None:
                sequence.give_up()
                answers.append(Draft(sequence.key, sequence.committed_len, [], ProposalStatus.OUT_OF_KV))
            return
        blocks = self._engine.block_ids(resident.request_id)
        self._add_row(step, resident, sequence.main, blocks, draws, guesses)

    def _add_ahead(self, step: DraftStep) -> None:
        """Main lines of answered sequences first, then side branches, the likeliest outcomes first."""
        answered = [r for r in self._residents.values() if not r.sequence.due and r.can_draft and not r.retired]
        for resident in answered:
            self._add_main(step, resident, None)
            self._spawn(resident)
        sides = [(side, resident) for resident in answered for side in resident.sequence.sides.values()]
        sides.sort(key=lambda entry: -entry[0].value)
        for side, resident in sides:
            draws, guesses = self._draws(resident, side.line)
            if not draws or not self._has_room(step, 1 + len(guesses)):
                continue
            own = self._engine.block_ids(resident.request_id)
            self._add_row(step, resident, side.line, self._branches.table(own, side), draws, guesses)
            self.side_rows_run += 1

    def _draws(self, resident: _Resident, line: Line) -> tuple[list[Draw], list[int]]:
        """What the line's next row draws, and what an earlier passage of the text says these draws will be."""
        sequence, index = resident.sequence, resident.index
        if not sequence.free_of_rounds:
            # A right guess makes an answer come sooner. Where a late answer is dropped, tokens that were guessed would
            # be dropped less often than others: no longer draws from q.
            index = None
        draws = sequence.next_draws(line, 1 + (self._limits.max_guesses if index is not None else 0))
        if index is None or len(draws) < 2:
            return draws, []
        end = line.end
        suffix = sequence.token_ids(line, max(end - self._limits.prompt_lookup_max, 0), end)
        guesses = index.lookup(len(draws) - 1, suffix)
        return draws[: len(guesses) + 1], guesses

    def _add_row(
        self,
        step: DraftStep,
        resident: _Resident,
        line: Line,
        blocks: tuple[list[int], ...],
        draws: list[Draw],
        guesses: list[int],
    ) -> None:
        start = line.num_computed
        ids = resident.sequence.token_ids(line, start, line.end)
        step.plan.rows.append(StepRow(ids, start, blocks, draws, guesses))
        step.targets.append((resident, line))
        self.rows_run += 1

    def _has_room(self, step: DraftStep, num_tokens: int) -> bool:
        fed = sum(row.num_fed for row in step.plan.rows)
        return len(step.plan.rows) < self._max_rows and fed + num_tokens <= self._engine.max_num_batched_tokens

    def _allocate(self, resident: _Resident, end: int) -> bool:
        """KV blocks of the sequence's own for all positions below `end`; an adopted branch's are copied there."""
        sequence = resident.sequence
        length = sequence.committed_len
        known = min(end, length)
        computed = min(sequence.main.num_computed, known - 1)
        if resident.appended_to < length:
            self._engine.append(resident.request_id, sequence.text[resident.appended_to :])
            resident.appended_to = length
        while not self._engine.allocate(resident.request_id, computed, known - computed, end - known):
            # Who is waited for comes before what is drafted ahead.
            if not (sequence.due and self._drop_a_branch()):
                return False
        if sequence.adopted is not None:
            own = self._engine.block_ids(resident.request_id)
            self._branches.restore(own, sequence.adopted)
            sequence.adopted = None
        return True

    def _drop_a_branch(self) -> bool:
        for resident in self._residents.values():
            sequence = resident.sequence
            if sequence.sides:
                _, side = sequence.sides.popitem()
                self._branches.free(side)
                return True
        return False

    def _spawn(self, resident: _Resident) -> None:
        """Side branches for the likeliest outcomes that verification may have from what is proposed now."""
        sequence, limits = resident.sequence, self._limits
        if sequence.adopted is not None or limits.max_side_branches == 0:
            return
        open_outcomes = sequence.open_outcomes()
        if not open_outcomes:
            return
        found: list[Outcome] = []
        reach, at = 1.0, sequence.committed_len
        for position, drawn in open_outcomes:
            while at < position:
                before = sequence.main.at(at)
                reach *= self._outcomes.acceptance(before) if before is not None else 1.0
                at += 1
            found += self._outcomes.outcomes(reach, position, drawn)
        found = [o for o in found if o.value >= self._cost.row_share and o.position + 1 < sequence.max_len]
        found.sort(key=lambda outcome: -outcome.value)
        for outcome in found[: max(limits.max_side_branches - len(sequence.sides), 0)]:
            line = Line(outcome.position, [outcome.token], [None], num_computed=outcome.position)
            side = SideBranch(line, outcome.value)
            own = self._engine.block_ids(resident.request_id)
            if not self._branches.allocate(own, side, outcome.position + 1 + sequence.num_wanted):
                return
            sequence.sides[outcome.position, outcome.token] = side

    # Prefill.

    def _prefill(self, idle: bool = False) -> DraftStep | None:
        """The oldest sequences first, prefill_chunk_tokens over all of them. idle: those that nobody wants drafts of,
        so that they are ready when somebody does."""
        step = DraftStep(self._engine, self._clock)
        budget = self._chunk
        for resident in self._residents.values():
            sequence = resident.sequence
            if resident.retired or resident.can_draft or (sequence.num_wanted == 0) != idle:
                continue
            if budget == 0 or len(step.plan.rows) == self._max_rows:
                break
            start = sequence.main.num_computed
            # The last token makes the first draft.
            end = min(start + budget, sequence.committed_len - 1)
            if not self._allocate(resident, end):
                continue  # a shorter one may still fit
            budget -= end - start
            ids = sequence.text[start:end]
            step.plan.rows.append(StepRow(ids, start, self._engine.block_ids(resident.request_id)))
            step.targets.append((resident, None))
        if not step.plan.rows:
            return None
        self._steps_since_prefill = 0
        step.plan.restores, step.plan.copies = self._branches.take_copies()
        return step

    def _prefilled(self, resident: _Resident, num_computed: int) -> list[Draft]:
        main = resident.sequence.main
        main.num_computed = max(main.num_computed, num_computed)
        ready = self._announce(resident)
        return [] if ready is None else [ready]

    def _announce(self, resident: _Resident) -> Draft | None:
        sequence = resident.sequence
        if resident.announced or not resident.can_draft:
            return None
        resident.announced = True
        return Draft(sequence.key, sequence.committed_len, [], ProposalStatus.READY)

    # What is over.

    def _retire(self, resident: _Resident) -> None:
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
            self._branches.free(side)
        sequence.dropped.clear()
