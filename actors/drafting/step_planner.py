"""What the draft model's next step holds: whose rows, fed with what, in which KV blocks. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from actors.drafting.branch_blocks import BranchBlocks
from actors.drafting.draft_step import DraftStep
from actors.drafting.engine import Engine
from actors.drafting.line import Line
from actors.drafting.outcomes import Outcome, OutcomeModel
from actors.drafting.resident import Resident
from actors.drafting.sequence import SideBranch
from actors.drafting.step_cost import StepCost
from actors.drafting.step_plan import Draw, StepRow
from actors.drafting.strategy import Draft
from actors.messages import ProposalStatus


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


class StepPlanner:
    """Plans between steps, never while one runs."""

    def __init__(
        self,
        engine: Engine,
        residents: Collection[Resident],
        limits: LookaheadLimits,
        prefill_chunk_tokens: int,
        outcomes: OutcomeModel,
        cost: StepCost,
        clock: Callable[[], float],
    ) -> None:
        """residents: all of them, a view that follows their coming and going."""
        self._engine, self._residents, self._limits, self._clock = engine, residents, limits, clock
        self._outcomes, self._cost = outcomes, cost
        self._chunk = min(prefill_chunk_tokens, engine.max_num_batched_tokens)
        self._max_rows = min(limits.max_rows, engine.max_num_batched_tokens)
        self.branches = BranchBlocks(engine)
        self._span = math.gcd(*engine.block_sizes)
        """Tokens that blocks hold whole multiples of: what is allocated to a multiple of it costs no block more."""

    def drafts(self, due: Collection[Resident], answers: list[Draft]) -> DraftStep | None:
        """A step over those who wait, in their order, then over what can be drafted ahead. answers: those that need no
        step are added."""
        step = DraftStep(self._engine, self._clock)
        for resident in due:
            self._add_main(step, resident, answers)
        if self._limits.ahead:
            self._add_ahead(step)
        return self._finished(step)

    def prefill(self, idle: bool = False) -> DraftStep | None:
        """The oldest sequences first, prefill_chunk_tokens over all of them. idle: those that nobody wants drafts of,
        so that they are ready when somebody does."""
        step = DraftStep(self._engine, self._clock)
        budget = self._chunk
        for resident in self._residents:
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
            step.plan.rows.append(StepRow(sequence.text[start:end], start, resident.blocks))
            step.targets.append((resident, None))
        return self._finished(step)

    def _finished(self, step: DraftStep) -> DraftStep | None:
        if not step.plan.rows:
            return None
        step.plan.restores, step.plan.copies = self.branches.take_copies()
        return step

    def _add_main(self, step: DraftStep, resident: Resident, answers: list[Draft] | None) -> None:
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
        if not self._has_blocks(resident, draws[-1].position) and not self._allocate(resident, draws[-1].position):
            if answers is not None:
                sequence.give_up()
                answers.append(Draft(sequence.key, sequence.committed_len, [], ProposalStatus.OUT_OF_KV))
            return
        self._add_row(step, resident, sequence.main, resident.blocks, draws, guesses)

    def _add_ahead(self, step: DraftStep) -> None:
        """Main lines of answered sequences first, then side branches, the likeliest outcomes first."""
        answered = [r for r in self._residents if not r.sequence.due and r.can_draft]
        for resident in answered:
            self._add_main(step, resident, None)
            self._spawn(resident)
        sides = [(side, resident) for resident in answered for side in resident.sequence.sides.values()]
        sides.sort(key=lambda entry: -entry[0].value)
        for side, resident in sides:
            draws, guesses = self._draws(resident, side.line)
            if not draws or not self._has_room(step, 1 + len(guesses)):
                continue
            self._add_row(step, resident, side.line, side.blocks, draws, guesses)

    def _draws(self, resident: Resident, line: Line) -> tuple[list[Draw], list[int]]:
        """What the line's next row draws, and what an earlier passage of the text says these draws will be."""
        sequence = resident.sequence
        index = resident.index.index if resident.index is not None and resident.index.is_read else None
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
        resident: Resident,
        line: Line,
        blocks: tuple[list[int], ...],
        draws: list[Draw],
        guesses: list[int],
    ) -> None:
        start = line.num_computed
        ids = resident.sequence.token_ids(line, start, line.end)
        step.plan.rows.append(StepRow(ids, start, blocks, draws, guesses))
        step.targets.append((resident, line))

    def _has_room(self, step: DraftStep, num_tokens: int) -> bool:
        fits = step.num_fed + num_tokens <= self._engine.max_num_batched_tokens
        return fits and len(step.plan.rows) < self._max_rows

    def _has_blocks(self, resident: Resident, end: int) -> bool:
        """Nothing was committed since blocks were last allocated, and they reach as far."""
        sequence = resident.sequence
        settled = resident.allocated_for == sequence.committed_len and sequence.adopted is None
        return settled and end <= resident.allocated_to

    def _allocate(self, resident: Resident, end: int) -> bool:
        """KV blocks of the sequence's own for all positions below `end`; an adopted branch's are copied there."""
        sequence = resident.sequence
        length = sequence.committed_len
        end = min(-(-end // self._span) * self._span, sequence.max_len) if end >= length else end
        known = min(end, length)
        computed = min(sequence.main.num_computed, known - 1)
        if resident.appended_to < length:
            self._engine.append(resident.request_id, sequence.text[resident.appended_to :])
            resident.appended_to = length
        while not self._engine.allocate(resident.request_id, computed, known - computed, end - known):
            # Who is waited for comes before what is drafted ahead.
            if not (sequence.due and self._drop_a_branch()):
                return False
        resident.blocks = self._engine.block_ids(resident.request_id)
        resident.allocated_for, resident.allocated_to = length, end
        if sequence.adopted is not None:
            self.branches.restore(resident.blocks, sequence.adopted)
            sequence.adopted = None
        return True

    def _drop_a_branch(self) -> bool:
        for resident in self._residents:
            sequence = resident.sequence
            if sequence.sides:
                _, side = sequence.sides.popitem()
                self.branches.free(side)
                return True
        return False

    def _spawn(self, resident: Resident) -> None:
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
            if not self.branches.allocate(resident.blocks, side, outcome.position + 1 + sequence.num_wanted):
                return
            sequence.sides[outcome.position, outcome.token] = side
