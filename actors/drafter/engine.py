"""The part of the draft model's engine that drafting's policy needs; `DraftEngine` is the real one.

KV blocks of side branches: copy-on-write from their sequence's, and back when a branch becomes the main line. Pure.

A branch shares every block before the one it starts in. That one is copied, unless it starts on the block's first slot,
and the ones after it are new.
"""

from __future__ import annotations

from typing import Protocol

from outrider.actors.drafter.sequence import Drawn, SideBranch, StepPlan


class Engine(Protocol):
    max_model_len: int
    max_num_batched_tokens: int
    block_sizes: tuple[int, ...]
    """Tokens in a KV block, of each KV cache group."""

    def start(self, request_id: str, token_ids: list[int]) -> int:
        """Register a sequence. Returns how many leading tokens the prefix cache has."""

    def append(self, request_id: str, token_ids: list[int]) -> None: ...

    def allocate(self, request_id: str, num_computed: int, num_new: int, num_lookahead: int) -> bool:
        """KV blocks for num_new committed tokens and num_lookahead drafts after num_computed valid ones. False: out of
        KV, nothing changed."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """All blocks of a sequence, one list per KV cache group."""

    def take_blocks(self, count: int) -> list[int] | None:
        """Blocks that belong to no sequence; None: out of KV."""

    def free_blocks(self, block_ids: list[int]) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def run(self, plan: StepPlan) -> list[list[Drawn]]:
        """Execute a step on every rank. Returns, for every row, what was drawn, up to the first draw that is not what
        was guessed."""

    @property
    def kv_cache_usage(self) -> float: ...


class BranchBlocks:
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
