"""The part of the draft model's engine that drafting's policy needs; `DraftEngine` is the real one."""

from __future__ import annotations

from typing import Protocol

from actors.drafting.line import Drawn
from actors.drafting.step_plan import StepPlan


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
