"""What the draft model's next step holds: whose rows, fed with what, in which KV blocks. Pure.

Whoever waits for an answer comes first, then what can be drafted ahead, the likeliest outcomes first; prompts are
prefilled in chunks. That is the order within a link. Where several links share the drafter and a step has no room for
all of them, `LinkShares` says whose turn it is. `OutcomeModel` says how likely an outcome is, `StepCost` what another
row costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.actors.drafter.engine import Draw, Drawn, Engine, StepPlan, StepRow
from outrider.actors.drafter.link_shares import LinkShares, Turns
from outrider.actors.drafter.model_sequence import DraftChain, ModelSequence, SideBranch
from outrider.actors.drafter.outcomes import Outcome, OutcomeModel, StepCost
from outrider.actors.drafter.sequence import Answer
from outrider.cluster.link.messages import ProposalStatus


class BranchBlocks:
    """KV blocks of side branches: copy-on-write from their sequence's, and back when a branch becomes the main line.

    A branch shares every block before the one it starts in. That one is copied, unless it starts on the block's first
    slot, and the ones after it are new.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._restores: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self.num_blocks = 0

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(from, to) block ids: those to copy first, and those after them."""
        restores, copies = self._restores, self._copies
        self._restores, self._copies = [], []
        return restores, copies

    def allocate(self, own: tuple[list[int], ...], side: SideBranch, end: int) -> bool:
        """Blocks for a branch that may reach positions below `end`. False: out of KV, nothing changed."""
        start = side.line.start
        spans = [range(start // size, -(-end // size)) for size in self._engine.block_sizes]
        blocks = self._engine.take_blocks(sum(len(span) for span in spans))
        if blocks is None:
            return False
        self.num_blocks += len(blocks)
        rest = iter(blocks)
        side.private = tuple({index: next(rest) for index in span} for span in spans)
        for group, size in enumerate(self._engine.block_sizes):
            if start % size:
                first = start // size
                self._copies.append((own[group][first], side.private[group][first]))
        side.blocks = tuple(
            own[group][: span.start] + list(private.values())
            for group, (span, private) in enumerate(zip(spans, side.private, strict=True))
        )
        return True

    def restore(self, own: tuple[list[int], ...], side: SideBranch) -> None:
        """Copy what a branch has computed into its sequence's blocks, which must reach as far, and free its own."""
        for group, size in enumerate(self._engine.block_sizes):
            for index, block in side.private[group].items():
                if index * size < side.line.num_computed and index < len(own[group]):
                    self._restores.append((block, own[group][index]))
        self.free(side)

    def free(self, side: SideBranch) -> None:
        blocks = [block for private in side.private for block in private.values()]
        side.private = ()
        # Whoever gets these blocks next must not find them overwritten.
        self._copies = [copy for copy in self._copies if copy[1] not in blocks]
        self.num_blocks -= len(blocks)
        self._engine.free_blocks(blocks)


@dataclass(eq=False, slots=True)
class DraftStep:
    """A planned step. targets: of each row the sequence and line it extends; None for a prefill chunk. draws: how lines
    go on in it. fed: tokens, by link. worth: of all its drafts the chance to be reached, in tokens."""

    is_step: ClassVar[bool] = True
    engine: Engine
    clock: Callable[[], float]
    plan: StepPlan = field(default_factory=StepPlan)
    targets: list[tuple[ModelSequence, DraftChain | None]] = field(default_factory=list)
    draws: dict[DraftChain, Draw] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)
    num_fed: int = 0
    worth: float = 0.0
    drawn: list[Drawn | None] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0

    def execute(self) -> None:
        self.started = self.clock()
        self.drawn = self.engine.run(self.plan)
        self.seconds = self.clock() - self.started

    def add(self, row: StepRow, sequence: ModelSequence, line: DraftChain | None) -> None:
        num_fed, link_id = len(row.token_ids), sequence.key[0]
        self.plan.rows.append(row)
        self.targets.append((sequence, line))
        if line is not None and row.draw is not None:
            self.draws[line] = row.draw
        self.fed[link_id] = self.fed.get(link_id, 0) + num_fed
        self.num_fed += num_fed


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """ahead: draft for the next round while this one is verified. max_side_branches: of one sequence. max_rows: of one
    step, all sequences together."""

    ahead: bool = True
    max_side_branches: int = 12
    max_rows: int = 128


_PIECES = 4
"""Of a chunk, for each link that shares it: so finely it is divided."""


def _is_prompt(sequence: ModelSequence) -> bool:
    """Too far behind its text to be drafted for."""
    return sequence.started and not sequence.retired and not sequence.can_draft


def _is_wanted_prompt(sequence: ModelSequence) -> bool:
    return _is_prompt(sequence) and sequence.num_wanted > 0


def _until_done(
    prompts: Iterable[ModelSequence], ends: Mapping[ModelSequence, int], without_room: Collection[ModelSequence]
) -> Iterator[ModelSequence]:
    """Each again and again until all of it is in the step, or there is no room for more of it."""
    for sequence in prompts:
        while sequence not in without_room and ends.get(sequence, 0) < sequence.committed_len - 1:
            yield sequence


def _best_sides(sequences: Iterable[ModelSequence], keep: float) -> list[tuple[float, SideBranch, ModelSequence]]:
    """With what another row of each is worth: the chance that verification gets so far. keep: of a draft to be
    accepted."""
    sides = [
        (side.value * keep ** (len(side.line.tokens) - 1), side, sequence)
        for sequence in sequences
        for side in sequence.sides.values()
    ]
    return sorted(sides, key=lambda entry: -entry[0])


class StepPlanner:
    """Plans between steps, never while one runs."""

    def __init__(
        self,
        engine: Engine,
        sequences: Collection[ModelSequence],
        limits: LookaheadLimits,
        prefill_chunk_tokens: int,
        outcomes: OutcomeModel,
        cost: StepCost,
        shares: LinkShares,
        clock: Callable[[], float],
    ) -> None:
        """sequences: all of them, a view that follows their coming and going."""
        self._engine, self._sequences, self._limits, self._clock = engine, sequences, limits, clock
        self._outcomes, self._cost, self._shares = outcomes, cost, shares
        self._chunk = min(prefill_chunk_tokens, engine.max_num_batched_tokens)
        self._max_rows = min(limits.max_rows, engine.max_num_batched_tokens)
        self.branches = BranchBlocks(engine)
        self._span = math.gcd(*engine.block_sizes)
        """Tokens that blocks hold whole multiples of: what is allocated to a multiple of it costs no block more."""

    def drafts(self, due: Collection[ModelSequence], answers: list[Answer]) -> DraftStep | None:
        """A step over those who wait, in their order, then over what can be drafted ahead. answers: those that need no
        step are added.

        Rows of side branches, the best first, go in as long as each brings more than it holds all the others up: so the
        step's worth over its time is the highest there is. One target's are nearly free; where many share the step,
        only the likely ones are worth it.
        """
        step = DraftStep(self._engine, self._clock)
        turns = self._turns(self._max_rows)
        waiting = self._by_link(due)
        queues = {
            link_id: self._main_lines(waiting.get(link_id, ()), of_link)
            for link_id, of_link in self._by_link(self._sequences).items()
        }
        answered: dict[int, list[ModelSequence]] = {}
        keep = self._outcomes.usual_acceptance
        for sequence in turns.over(queues):
            link_id = sequence.key[0]
            worth = keep**sequence.num_drafted
            num_fed = self._add_main(step, sequence, answers if sequence.due else None)
            turns.gave(link_id, num_fed)
            step.worth += worth if num_fed else 0.0
            if not sequence.due:
                self._spawn(sequence)
                answered.setdefault(link_id, []).append(sequence)
        row_share = self._cost.row_share
        sides = {
            link_id: itertools.takewhile(lambda entry: entry[0] >= row_share * step.worth, _best_sides(of_link, keep))
            for link_id, of_link in answered.items()
        }
        for worth, side, sequence in turns.over(sides):
            draw = sequence.next_draw(side.line)
            if draw is not None and self._has_room(step, 1):
                self._add_row(step, sequence, side.line, side.blocks, draw)
                turns.gave(sequence.key[0], 1)
                step.worth += worth
        return self._finished(step)

    def prefill(self, idle: bool = False) -> DraftStep | None:
        """The oldest sequences first, prefill_chunk_tokens over all of them. idle: those that nobody wants drafts of,
        so that they are ready when somebody does. No text is begun that there is no room for: read in part it would
        hold KV blocks as long as it lives, and nobody could be drafted for."""
        step = DraftStep(self._engine, self._clock)
        turns = self._turns(self._chunk)
        budget = self._chunk
        ends: dict[ModelSequence, int] = {}
        queues = self._by_link([s for s in self._sequences if _is_prompt(s) and (s.num_wanted == 0) == idle])
        piece = budget if len(queues) < 2 else max(budget // (_PIECES * len(queues)), 1)
        without_room: set[ModelSequence] = set()
        room = self._room() if queues else 0
        prompts = {link_id: _until_done(of_link, ends, without_room) for link_id, of_link in queues.items()}
        for sequence in turns.over(prompts):
            if budget == 0:
                break
            if sequence not in ends and not sequence.allocated_to:
                missing = self._engine.missing(sequence.engine_id)
                if missing > room:
                    sequence.lacks_room = True
                    without_room.add(sequence)
                    continue
                room -= missing
            start = ends.get(sequence, sequence.main.num_computed)
            # The last token makes the first draft.
            end = min(start + min(piece, budget), sequence.committed_len - 1)
            is_full = len(ends) == self._max_rows and sequence not in ends
            if is_full or not self._allocate(sequence, end):
                without_room.add(sequence)
                continue  # a shorter one may still fit
            ends[sequence] = end
            budget -= end - start
            turns.gave(sequence.key[0], end - start)
        for sequence, end in ends.items():
            start = sequence.main.num_computed
            row = StepRow(sequence.text[start:end], start, sequence.blocks, adapter=sequence.sampling.adapter)
            step.add(row, sequence, None)
        return self._finished(step)

    def _room(self) -> int:
        """KV blocks for texts that are not begun: all that are free, or a side branch's, but for those that begun texts
        lack, and one of each group for every sequence that has some, to go on with."""
        holding = self._holding()
        lacking = sum(self._engine.missing(sequence.engine_id) for sequence in holding if _is_prompt(sequence))
        spare = len(holding) * len(self._engine.block_sizes)
        return self._engine.num_free_blocks + self.branches.num_blocks - lacking - spare

    def _holding(self) -> list[ModelSequence]:
        """Those with KV blocks for what they have read."""
        return [sequence for sequence in self._sequences if sequence.allocated_to and not sequence.retired]

    def _turns(self, capacity: int) -> Turns:
        self._shares.begin()
        return self._shares.turns(capacity)

    def _by_link(self, sequences: Collection[ModelSequence]) -> Mapping[int, Collection[ModelSequence]]:
        """In their order."""
        if not self._shares.contended:
            return {any_of_it.key[0]: sequences for any_of_it in itertools.islice(sequences, 1)}
        found: dict[int, list[ModelSequence]] = {}
        for sequence in sequences:
            found.setdefault(sequence.key[0], []).append(sequence)
        return found

    def _main_lines(self, due: Iterable[ModelSequence], of_link: Iterable[ModelSequence]) -> Iterator[ModelSequence]:
        """One link's: those who wait, then those who had or have just had an answer."""
        yield from due
        if self._limits.ahead:
            yield from [s for s in of_link if not s.due and s.can_draft]

    def _finished(self, step: DraftStep) -> DraftStep | None:
        if not step.plan.rows:
            return None
        step.plan.restores, step.plan.copies = self.branches.take_copies()
        self._shares.charge(step.fed, self._held_back(step) if self._shares.contended else ())
        return step

    def _held_back(self, step: DraftStep) -> set[int]:
        """Links whose target waits for drafts, or for a prompt, with nothing or with more to do than is in the step."""
        served = {sequence for sequence, _ in step.targets}
        missing = (s for s in self._sequences if (s.due and s.can_draft and s not in served) or _is_wanted_prompt(s))
        return {sequence.key[0] for sequence in missing}

    def _add_main(self, step: DraftStep, sequence: ModelSequence, answers: list[Answer] | None) -> int:
        """The main line's next row; how many tokens it feeds, 0: there is none. answers: of a sequence that is due;
        OUT_OF_KV goes there."""
        draw = sequence.next_draw(sequence.main)
        if draw is None:
            answer = sequence.answer()
            if answer is not None and answers is not None:
                answers.append(answer)
            return 0
        num_fed = sequence.num_uncomputed
        if not self._has_room(step, num_fed):
            return 0
        if not self._has_blocks(sequence, draw.position) and not self._allocate(sequence, draw.position):
            if answers is not None:
                answers.append(sequence.give_up(ProposalStatus.OUT_OF_KV))
                self._give_back(sequence)
            return 0
        self._add_row(step, sequence, sequence.main, sequence.blocks, draw)
        return num_fed

    def _add_row(
        self, step: DraftStep, sequence: ModelSequence, line: DraftChain, blocks: tuple[list[int], ...], draw: Draw
    ) -> None:
        start = line.num_computed
        ids = sequence.token_ids(line, start, line.end)
        step.add(StepRow(ids, start, blocks, draw, sequence.sampling.adapter), sequence, line)

    def _has_room(self, step: DraftStep, num_tokens: int) -> bool:
        fits = step.num_fed + num_tokens <= self._engine.max_num_batched_tokens
        return fits and len(step.plan.rows) < self._max_rows

    def _has_blocks(self, sequence: ModelSequence, end: int) -> bool:
        """Nothing was committed since blocks were last allocated, and they reach as far."""
        settled = sequence.allocated_for == sequence.committed_len and sequence.adopted is None
        return settled and end <= sequence.allocated_to

    def _allocate(self, sequence: ModelSequence, end: int) -> bool:
        """KV blocks of the sequence's own for all positions below `end`; an adopted branch's are copied there."""
        length = sequence.committed_len
        end = min(-(-end // self._span) * self._span, sequence.max_len) if end >= length else end
        known = min(end, length)
        computed = min(sequence.main.num_computed, known - 1)
        if sequence.appended_to < length:
            self._engine.append(sequence.engine_id, sequence.text[sequence.appended_to :])
            sequence.appended_to = length
        while not self._engine.allocate(sequence.engine_id, computed, known - computed, end - known):
            # Who is waited for comes before what is drafted ahead.
            if not (sequence.due and self._drop_a_branch()):
                return False
        sequence.blocks = self._engine.block_ids(sequence.engine_id)
        sequence.allocated_for, sequence.allocated_to, sequence.lacks_room = length, end, False
        if sequence.adopted is not None:
            self.branches.restore(sequence.blocks, sequence.adopted)
            sequence.adopted = None
        return True

    def _give_back(self, sequence: ModelSequence) -> None:
        """All blocks of one that cannot go on, where others can with them: it is read again once there is room. None of
        its lines is in the step."""
        if sequence.allocated_to and any(other is not sequence for other in self._holding()):
            self._engine.give_back(sequence.engine_id)
            sequence.begin_again()

    def _drop_a_branch(self) -> bool:
        """One of the link's that has had most, of its oldest sequence that has any."""
        with_branches = [sequence for sequence in self._sequences if sequence.sides]
        if not with_branches:
            return False
        sequence = max(with_branches, key=lambda s: self._shares.time_of(s.key[0]))
        _, side = sequence.sides.popitem()
        self.branches.free(side)
        return True

    def _spawn(self, sequence: ModelSequence) -> None:
        """Side branches for the likeliest outcomes that verification may have from what is proposed now."""
        limits = self._limits
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
            line = DraftChain(outcome.position, [outcome.token], [None], num_computed=outcome.position)
            side = SideBranch(line, outcome.value)
            if not self.branches.allocate(sequence.blocks, side, outcome.position + 1 + sequence.num_wanted):
                return
            sequence.sides[outcome.position, outcome.token] = side
