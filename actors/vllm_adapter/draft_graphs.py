"""The CUDA graphs that vLLM captured of the draft model: FULL ones, of a whole pass with one token a row, and PIECEWISE
ones, of what lies between attention layers.

A graph reads where it read when it was captured, whatever the model is handed now: in the runner's buffers. Pieces read
token ids, positions and what is padding there, and, where vLLM does not take the writing of KV out of them
(`BreakableCUDAGraphCapture`, `use_inductor_graph_partition`), KV slots: one for every token, -1 for padding. A FULL
graph reads all that attention is told. What is a number on the host stays what it was, so a FULL graph is of so many
rows, and a step with fewer has rows of nothing after its own, which read no KV and write none. What the attention
backends keep in buffers of their own is renewed where metadata is built, in every step. M-RoPE positions, and states
that are no KV, would be in other buffers: `DraftEngine` takes no model with either. Never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

_OF_ANY_ROWS = frozenset({CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE})
_OF_ONE_TOKEN_A_ROW = _OF_ANY_ROWS | {CUDAGraphMode.FULL}


@dataclass(frozen=True, slots=True)
class Graph:
    """What one step replays. mode NONE: nothing."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def is_full(self) -> bool:
        return self.mode is CUDAGraphMode.FULL

    @property
    def num_tokens(self) -> int:
        """With padding."""
        return int(self.descriptor.num_tokens)

    def padded(
        self, query_start: NDArray[np.int32], seq_lens: NDArray[np.int32], slots: Sequence[NDArray[np.int64]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], list[NDArray[np.int64]]]:
        """What attention is told: of each KV cache group a slot for each token of the graph, and, if it is FULL, for as
        many rows as it has."""
        if self.is_full:
            num_rows = self.descriptor.num_reqs
            assert num_rows is not None
            query_start, seq_lens = _padded(query_start, num_rows + 1, query_start[-1]), _padded(seq_lens, num_rows, 0)
        return query_start, seq_lens, [_padded(of_group, self.num_tokens, PAD_SLOT_ID) for of_group in slots]


class DraftGraphs:
    def __init__(self, runner: Any) -> None:
        """runner: vLLM's V1 model runner, which has captured."""
        self._dispatcher, self._token_ids = runner.cudagraph_dispatcher, runner.input_ids.gpu
        self._positions, self._is_padding = runner.positions, runner.is_padding
        self._query_start, self._seq_lens = runner.query_start_loc.gpu, runner.seq_lens
        tables = runner.input_batch.block_table
        self._slots = [tables[group].slot_mapping.gpu for group in range(len(runner.attn_groups))]

    def choose(self, num_tokens: int, one_a_row: bool, num_adapters: int) -> Graph:
        """one_a_row: whether every row feeds one token. num_adapters: that the tokens are of: graphs without any leave
        them out."""
        mode, descriptor = self._dispatcher.dispatch(
            num_tokens,
            uniform_decode=one_a_row,
            has_lora=num_adapters > 0,
            num_active_loras=num_adapters,
            valid_modes=_OF_ONE_TOKEN_A_ROW if one_a_row else _OF_ANY_ROWS,
        )
        return Graph(mode, descriptor)

    def put(
        self, graph: Graph, query_start: Tensor, seq_lens: Tensor, slots: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """What attention is told, in the buffers that the graph reads. Block tables are there already."""
        if graph.mode is not CUDAGraphMode.NONE:
            slots = [_put(buffer, of_group) for buffer, of_group in zip(self._slots, slots, strict=True)]
        if graph.is_full:
            query_start, seq_lens = _put(self._query_start, query_start), _put(self._seq_lens, seq_lens)
        return query_start, seq_lens, slots

    def put_inputs(self, graph: Graph, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The model's inputs, [tokens], padded, in the buffers that graphs read, and what the forward context is
        told."""
        total, padded = len(token_ids), graph.num_tokens
        _put(self._token_ids, token_ids)
        _put(self._positions, positions)
        self._positions[total:padded].zero_()
        # Routers of mixture-of-experts models read it in the graphs, which were captured with nothing but padding: a
        # token that is taken for padding gets no expert.
        is_padding = self._is_padding[:padded]
        is_padding[:total].fill_(False)
        is_padding[total:].fill_(True)
        context = {
            "num_tokens": padded,
            "cudagraph_runtime_mode": graph.mode,
            "batch_descriptor": graph.descriptor,
            "is_padding": is_padding,
        }
        return self._token_ids[:padded], self._positions[:padded], context


def graphs_of(runner: Any) -> DraftGraphs | None:
    """None where nothing is captured: on a CPU, and with `enforce_eager`."""
    return None if runner.cudagraph_dispatcher.cudagraph_mode is CUDAGraphMode.NONE else DraftGraphs(runner)


def _padded(array: NDArray[Any], length: int, value: int) -> NDArray[Any]:
    if len(array) == length:
        return array
    padded = np.full(length, value, array.dtype)
    padded[: len(array)] = array
    return padded


def _put(buffer: Tensor, new: Tensor) -> Tensor:
    buffer[: len(new)].copy_(new, non_blocking=True)
    return buffer[: len(new)]
