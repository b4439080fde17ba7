"""Defines what drafting needs of a draft model's engine: one step over many rows, and KV blocks for them.
Imports neither vLLM, Ray nor torch.

`vllm_adapter/draft_engine.py` implements `Engine` on vLLM. A `StepPlan` travels to each of its ranks, and what was
`Drawn` comes back from the first one: plain data both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.cluster.link.messages import DraftSampling


@dataclass(frozen=True, slots=True)
class Draw:
    """Says how the token after a row is drawn: at `position`, as a draft of the round that starts at `round_start`.

    alternatives: how many other likely tokens to name.
    """

    sampling: DraftSampling
    position: int
    round_start: int
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token.

    q_ids: int32 [n], q_probs: float32 [n], what it was drawn from; None where no q need travel.
    confidence: the drafter's probability of the token. alternatives: other tokens the verifier may choose in its place,
    likeliest first, with the drafter's probability of each. usable: False where there was nothing to draw, with
    bad_logits because the logits were not finite.
    """

    token: int
    q_ids: np.ndarray | None = None
    q_probs: np.ndarray | None = None
    confidence: float = 1.0
    alternatives: tuple[tuple[int, float], ...] = ()
    usable: bool = True
    bad_logits: bool = False


@dataclass(slots=True)
class StepRow:
    """One row of a step: tokens to feed, the first of them at position `start`.

    block_ids: the KV blocks of the row's sequence from its beginning, one list per KV cache group, enough for what is
        fed. A list is never changed: a sequence that gets another block gets another list.
    draws: what is drawn, in the order of positions: the first after token_ids, each further one after a mask token,
        which the engine feeds behind them. The KV of a mask is of no use to any later row. Empty for a prefill chunk.
    adapter: number of the draft model's LoRA adapter; 0: none.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: tuple[Sequence[int], ...]
    draws: Sequence[Draw] = ()
    adapter: int = 0

    @property
    def num_masks(self) -> int:
        return max(len(self.draws) - 1, 0)

    @property
    def num_fed(self) -> int:
        """The number of tokens fed, masks included."""
        return len(self.token_ids) + self.num_masks


@dataclass(slots=True)
class StepPlan:
    """A step: its rows and what to do before them.

    restores, copies: (from, to) KV blocks to copy before anything is fed, first the ones, then the others.
    vocabulary_changes: (slot, token id) of the cut output head, see DraftVocabulary.
    num_drawable: ids from there on are not drawn, since a target has no such token; None: all are. A cut head has none
        of them.
    """

    rows: list[StepRow] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    vocabulary_changes: list[tuple[int, int]] = field(default_factory=list)
    num_drawable: int | None = None


class Engine(Protocol):
    """Runs steps of a draft model and owns its KV blocks."""

    max_model_len: int
    max_num_batched_tokens: int
    block_sizes: tuple[int, ...]
    """Tokens in a KV block, for each KV cache group."""

    def start(self, request_id: str, token_ids: list[int], sampling: DraftSampling) -> int:
        """Registers a sequence. Returns how many leading tokens the prefix cache has. Blocks are cached for the
        sampling's tenant and adapter."""

    def append(self, request_id: str, token_ids: list[int]) -> None: ...

    def allocate(self, request_id: str, num_computed: int, num_new: int, num_lookahead: int) -> bool:
        """Allocates KV blocks for num_new committed tokens and num_lookahead drafts after num_computed valid ones.
        Returns False when out of KV; then nothing has changed."""

    def give_back(self, request_id: str) -> None:
        """Frees all blocks of a sequence. Nothing of it is computed any more."""

    def missing(self, request_id: str) -> int:
        """Returns how many KV blocks a sequence lacks for all of its text."""

    @property
    def num_free_blocks(self) -> int: ...

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Returns all blocks of a sequence, one list per KV cache group."""

    def take_blocks(self, count: int) -> list[int] | None:
        """Takes blocks that belong to no sequence; None: out of KV."""

    def free_blocks(self, block_ids: list[int]) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def load_weights(self, tensors: Mapping[str, Any]) -> None:
        """Loads other tensors of the model, by the checkpoint's names, for all steps from now on.

        Neither embeddings nor output head are among them.
        """

    def run(self, plan: StepPlan) -> list[list[Drawn]]:
        """Executes a step on every rank. Returns for every row what was drawn, one for each of its draws."""

    @property
    def kv_cache_usage(self) -> float: ...
