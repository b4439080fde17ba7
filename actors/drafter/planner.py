"""Plans the draft model's steps: which rows, fed with which tokens, in which KV blocks.
Imports neither vLLM, Ray nor torch.

Within a link, sequences that wait for an answer come first, then what can be drafted ahead, the likeliest outcomes
first; prompts are prefilled in chunks. Links that share the drafter take turns row by row (`LinkTurns`). `OutcomeModel`
says how likely an outcome is, `StepCost` what another row costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from outrider.actors.drafter.engine import Draw, Drawn, Engine, StepPlan, StepRow
from outrider.actors.drafter.model_sequence import DraftChain, ModelSequence, SideBranch
from outrider.actors.drafter.outcomes import Outcome, OutcomeModel, StepCost
from outrider.actors.drafter.proposer import Outbox
from outrider.cluster.link.messages import ProposalStatus

T = TypeVar("T")


class LinkTurns:
    """Serves links round robin: one item of each in turn, and every step begins with another link.

    With one link this decides nothing: its items come in the order they have among themselves.
    """

    def __init__(self) -> None:
        self._last = 0
        """The link that the last step began with."""

    def order(self, queues: Mapping[int, Iterator[T]]) -> Iterator[T]:
        """Yields all items of the queues, those of each link in their order."""
        waiting = sorted(queues, key=lambda link_id: (link_id <= self._last, link_id))
        while waiting:
            served = []
            for link_id in waiting:
                for item in itertools.islice(queues[link_id], 1):
                    yield item
                    served.append(link_id)
            waiting = served

    def next_step(self, link_ids: Collection[int]) -> None:
        """Lets the next step begin with another link than this one. link_ids: the links with sequences."""
        later = [link_id for link_id in link_ids if link_id > self._last]
        self._last = min(later or link_ids, default=0)


class BranchBlocks:
    """Allocates KV blocks of side branches: copy-on-write from their sequence's, and back when a branch becomes the
    main line.

    A branch shares every block before the one that it begins to compute in. That one is copied, unless it begins on
    the block's first slot, and the ones after it are new.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._restores: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self.num_blocks = 0

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns the (from, to) block ids to copy first, and those to copy after them, since the last call."""
        restores, copies = self._restores, self._copies
        self._restores, self._copies = [], []
        return restores, copies

    def allocate(self, own: tuple[list[int], ...], side: SideBranch, end: int) -> bool:
        """Takes blocks for a branch that may reach positions below `end`. Returns False when out of KV; then nothing
        has changed."""
        start = side.chain.num_computed
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
        """Copies what a branch has computed into its sequence's blocks, which must reach as far, and frees its own."""
        for group, size in enumerate(self._engine.block_sizes):
            for index, block in side.private[group].items():
                if index * size < side.chain.num_computed and index < len(own[group]):
                    self._restores.append((block, own[group][index]))
        self.free(side)

    def free(self, side: SideBranch) -> None:
        """Frees a branch's own blocks, and forgets the copies into them that no step has made yet."""
        blocks = [block for private in side.private for block in private.values()]
        side.private = ()
        # The next owner of these blocks must not find them overwritten.
        self._copies = [copy for copy in self._copies if copy[1] not in blocks]
        self.num_blocks -= len(blocks)
        self._engine.free_blocks(blocks)


@dataclass(eq=False, slots=True)
class DraftStep:
    """A planned step.

    targets: of each row the sequence and the chain that it extends; None for a prefill chunk.
    reach_sum: of all rows that draw, the sum of the probabilities that verification reaches them.
    """

    is_step: ClassVar[bool] = True
    engine: Engine
    clock: Callable[[], float]
    plan: StepPlan = field(default_factory=StepPlan)
    targets: list[tuple[ModelSequence, DraftChain | None]] = field(default_factory=list)
    num_fed: int = 0
    reach_sum: float = 0.0
    drawn: list[list[Drawn]] = field(default_factory=list)
    seconds: float = 0.0

    def execute(self) -> None:
        started = self.clock()
        self.drawn = self.engine.run(self.plan)
        self.seconds = self.clock() - started

    def add(self, row: StepRow, sequence: ModelSequence, chain: DraftChain | None) -> None:
        self.plan.rows.append(row)
        self.targets.append((sequence, chain))
        self.num_fed += row.num_fed


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """Limits what is drafted ahead.

    ahead: draft for the next round while this one is verified. max_side_branches: per sequence. max_rows: per step, of
    all sequences together.
    """

    ahead: bool
    max_side_branches: int
    max_rows: int


_PIECES = 4
"""Pieces of a chunk for each link that shares it."""


def _is_prompt(sequence: ModelSequence) -> bool:
    """Returns whether it must read its text before it can be drafted for."""
    return not sequence.retired and not sequence.can_draft


def _by_link(sequences: Iterable[ModelSequence]) -> dict[int, list[ModelSequence]]:
    """Returns each link's sequences, in their order."""
    found: dict[int, list[ModelSequence]] = {}
    for sequence in sequences:
        found.setdefault(sequence.key[0], []).append(sequence)
    return found


def _until_done(
    prompts: Iterable[ModelSequence], ends: Mapping[ModelSequence, int], without_room: Collection[ModelSequence]
) -> Iterator[ModelSequence]:
    """Yields each prompt until all of it is in the step, or there is no room for more of it."""
    for sequence in prompts:
        while sequence not in without_room and ends.get(sequence, 0) < sequence.committed_len - 1:
            yield sequence


def _best_sides(sequences: Iterable[ModelSequence], keep: float) -> list[tuple[float, SideBranch, ModelSequence]]:
    """Returns side branches, the likeliest first, each with the probability that verification reaches its next row.

    keep: the probability that a draft is accepted.
    """
    sides = [
        (side.value * keep ** (len(side.chain.tokens) - 1), side, sequence)
        for sequence in sequences
        for side in sequence.sides.values()
    ]
    return sorted(sides, key=lambda entry: -entry[0])


class StepPlanner:
    """Plans steps over all sequences. No step runs meanwhile."""

    def __init__(
        self,
        engine: Engine,
        sequences: Collection[ModelSequence],
        limits: LookaheadLimits,
        prefill_chunk_tokens: int,
        outcomes: OutcomeModel,
        cost: StepCost,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        """sequences: a view of all open ones, the oldest first. outbox: takes answers that need no step."""
        self._engine, self._sequences, self._limits, self._clock = engine, sequences, limits, clock
        self._outcomes, self._cost, self._outbox = outcomes, cost, outbox
        self._chunk = min(prefill_chunk_tokens, engine.max_num_batched_tokens)
        self._max_rows = min(limits.max_rows, engine.max_num_batched_tokens)
        self.branches = BranchBlocks(engine)
        self.turns = LinkTurns()
        self._span = math.gcd(*engine.block_sizes)
        """Tokens that blocks hold whole multiples of: what is allocated to a multiple of it costs no block more."""

    def drafts(self, due: Collection[ModelSequence]) -> DraftStep | None:
        """Returns a step over the sequences that wait, in their order, then over what can be drafted ahead.

        Adds side-branch rows by decreasing reach probability while it is at least row_share times the sum over the rows
        already in the step.
        """
        step = DraftStep(self._engine, self._clock)
        waiting = _by_link(due)
        queues = {
            link_id: self._main_lines(waiting.get(link_id, ()), of_link)
            for link_id, of_link in _by_link(self._sequences).items()
        }
        answered: dict[int, list[ModelSequence]] = {}
        keep = self._outcomes.usual_acceptance
        for sequence in self.turns.order(queues):
            reach_probability = keep**sequence.num_drafted
            if self._add_main(step, sequence):
                step.reach_sum += reach_probability
            if not sequence.due:
                self._spawn(sequence)
                answered.setdefault(sequence.key[0], []).append(sequence)
        row_share = self._cost.row_share
        sides = {
            link_id: itertools.takewhile(
                lambda entry: entry[0] >= row_share * step.reach_sum, _best_sides(of_link, keep)
            )
            for link_id, of_link in answered.items()
        }
        for reach_probability, side, sequence in self.turns.order(sides):
            chain, draws = side.chain, sequence.next_draws(side.chain)
            if draws and self._has_room(step, draws[-1].position - chain.num_computed):
                self._add_row(step, sequence, chain, side.blocks, draws)
                step.reach_sum += reach_probability
        return self._finished(step)

    def prefill(self, idle: bool = False) -> DraftStep | None:
        """Returns a step that reads prefill_chunk_tokens of prompts, the oldest sequences of each link first.

        No text is begun without room for all of it: read in part it would hold KV blocks as long as it lives, and
        nobody could be drafted for.

        Args:
            idle: read the texts that no drafts are wanted of, so that they are ready when some are.
        """
        step = DraftStep(self._engine, self._clock)
        budget = self._chunk
        ends: dict[ModelSequence, int] = {}
        queues = _by_link(s for s in self._sequences if _is_prompt(s) and (s.num_wanted == 0) == idle)
        piece = budget if len(queues) < 2 else max(budget // (_PIECES * len(queues)), 1)
        without_room: set[ModelSequence] = set()
        room = self._room() if queues else 0
        prompts = {link_id: _until_done(of_link, ends, without_room) for link_id, of_link in queues.items()}
        for sequence in self.turns.order(prompts):
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
        for sequence, end in ends.items():
            start = sequence.main.num_computed
            row = StepRow(sequence.text[start:end], start, sequence.blocks, adapter=sequence.sampling.adapter)
            step.add(row, sequence, None)
        return self._finished(step)

    def _room(self) -> int:
        """Returns the KV blocks for texts that are not begun: all that are free or a side branch's, without those that
        begun texts lack, and without one of each group for every sequence that has some, to go on with."""
        holding = self._holding()
        lacking = sum(self._engine.missing(sequence.engine_id) for sequence in holding if _is_prompt(sequence))
        spare = len(holding) * len(self._engine.block_sizes)
        return self._engine.num_free_blocks + self.branches.num_blocks - lacking - spare

    def _holding(self) -> list[ModelSequence]:
        """Returns the sequences with KV blocks for what they have read."""
        return [sequence for sequence in self._sequences if sequence.allocated_to and not sequence.retired]

    def _main_lines(self, due: Iterable[ModelSequence], of_link: Iterable[ModelSequence]) -> Iterator[ModelSequence]:
        """Yields one link's sequences: those that wait, then those that had or have just had an answer."""
        yield from due
        if self._limits.ahead:
            yield from [s for s in of_link if not s.due and s.can_draft and s.num_proposed_paths == 1]

    def _finished(self, step: DraftStep) -> DraftStep | None:
        if not step.plan.rows:
            return None
        step.plan.restores, step.plan.copies = self.branches.take_copies()
        self.turns.next_step({sequence.key[0] for sequence in self._sequences})
        return step

    def _add_main(self, step: DraftStep, sequence: ModelSequence) -> bool:
        """Adds the main line's next row, and returns whether there is one. Answers a sequence that is due and cannot
        have one for want of KV blocks."""
        draws = sequence.next_draws(sequence.main)
        if not draws:  # it is not due: a commit that needs no draws is answered at once
            return False
        end = draws[-1].position
        if not self._has_room(step, end - sequence.main.num_computed):
            return False
        if not self._has_blocks(sequence, end) and not self._allocate(sequence, end):
            if sequence.due:
                self._outbox.add(sequence, sequence.give_up(ProposalStatus.OUT_OF_KV))
                self._give_back(sequence)
            return False
        self._add_row(step, sequence, sequence.main, sequence.blocks, draws)
        return True

    def _add_row(
        self,
        step: DraftStep,
        sequence: ModelSequence,
        chain: DraftChain,
        blocks: tuple[list[int], ...],
        draws: list[Draw],
    ) -> None:
        start = chain.num_computed
        ids = sequence.token_ids(chain, start, chain.end)
        step.add(StepRow(ids, start, blocks, draws, sequence.sampling.adapter), sequence, chain)

    def _has_room(self, step: DraftStep, num_tokens: int) -> bool:
        fits = step.num_fed + num_tokens <= self._engine.max_num_batched_tokens
        return fits and len(step.plan.rows) < self._max_rows

    def _has_blocks(self, sequence: ModelSequence, end: int) -> bool:
        """Returns whether nothing was committed since blocks were last allocated, and they reach as far."""
        settled = sequence.allocated_for == sequence.committed_len and sequence.adopted is None
        return settled and end <= sequence.allocated_to

    def _allocate(self, sequence: ModelSequence, end: int) -> bool:
        """Allocates KV blocks of the sequence's own for all positions below `end`, into which an adopted branch's are
        copied. Returns False when out of KV."""
        length = sequence.committed_len
        end = min(-(-end // self._span) * self._span, sequence.max_len) if end >= length else end
        known = min(end, length)
        computed = min(sequence.main.num_computed, known - 1)
        if sequence.appended_to < length:
            self._engine.append(sequence.engine_id, sequence.text[sequence.appended_to :])
            sequence.appended_to = length
        while not self._engine.allocate(sequence.engine_id, computed, known - computed, end - known):
            # Sequences that are due come before what is drafted ahead.
            if not (sequence.due and self._drop_a_branch()):
                return False
        sequence.blocks = self._engine.block_ids(sequence.engine_id)
        sequence.allocated_for, sequence.allocated_to, sequence.lacks_room = length, end, False
        if sequence.adopted is not None:
            self.branches.restore(sequence.blocks, sequence.adopted)
            sequence.adopted = None
        return True

    def _give_back(self, sequence: ModelSequence) -> None:
        """Gives back all blocks of a sequence that cannot go on, where other sequences can use them. It is read again
        once there is room. None of its chains is in the step."""
        if sequence.allocated_to and any(other is not sequence for other in self._holding()):
            self._engine.give_back(sequence.engine_id)
            sequence.begin_again()

    def _drop_a_branch(self) -> bool:
        """Frees the last branch of the sequence that has most. Returns whether there was one."""
        sequence = max(self._sequences, key=lambda s: len(s.sides))
        if not sequence.sides:
            return False
        _, side = sequence.sides.popitem()
        self.branches.free(side)
        return True

    def _spawn(self, sequence: ModelSequence) -> None:
        """Adds side branches for the likeliest outcomes that verification may have from what is proposed now."""
        limits = self._limits
        if sequence.adopted is not None or limits.max_side_branches == 0 or sequence.num_proposed_paths > 1:
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
            computed = min(sequence.main.num_computed, outcome.position)
            chain = DraftChain(outcome.position, [outcome.token], [None], num_computed=computed)
            side = SideBranch(chain, outcome.value)
            if not self.branches.allocate(sequence.blocks, side, outcome.position + 1 + sequence.num_wanted):
                return
            sequence.sides[outcome.position, outcome.token] = side
