"""Replays the CUDA graphs that vLLM captured of the draft model.

FULL graphs hold a whole pass with one token per row, PIECEWISE graphs what lies between attention layers.

A graph reads the runner's buffers, as when it was captured, whatever tensors the model is given. Pieces read token ids,
positions and the padding mask there, and, where vLLM does not take KV writes out of them
(`BreakableCUDAGraphCapture`, `use_inductor_graph_partition`), KV slots: one for every token, -1 for padding. A FULL
graph also reads all attention metadata. Numbers on the host are fixed at the capture, so a FULL graph has a fixed
number of rows, and a step with fewer is padded with empty rows, which neither read nor write KV. Attention backends
renew their own buffers in every step, when metadata is built. M-RoPE positions and recurrent states would be in other
buffers; `DraftEngine` refuses models with either.
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
    """Describes the graph of one step. In mode NONE nothing is replayed."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def is_full(self) -> bool:
        return self.mode is CUDAGraphMode.FULL

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens with padding."""
        return int(self.descriptor.num_tokens)

    def padded(
        self, query_start: NDArray[np.int32], seq_lens: NDArray[np.int32], slots: Sequence[NDArray[np.int64]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], list[NDArray[np.int64]]]:
        """Pads attention's inputs: slots to the graph's tokens and, if it is FULL, the others to its rows."""
        if self.is_full:
            num_rows = self.descriptor.num_reqs
            assert num_rows is not None
            query_start, seq_lens = _padded(query_start, num_rows + 1, query_start[-1]), _padded(seq_lens, num_rows, 0)
        return query_start, seq_lens, [_padded(of_group, self.num_tokens, PAD_SLOT_ID) for of_group in slots]


class DraftGraphs:
    """Chooses a graph for each step, and copies its inputs to the runner's buffers."""

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's V1 model runner, which has captured."""
        self._dispatcher, self._token_ids = runner.cudagraph_dispatcher, runner.input_ids.gpu
        self._positions, self._is_padding = runner.positions, runner.is_padding
        self._query_start, self._seq_lens = runner.query_start_loc.gpu, runner.seq_lens
        tables = runner.input_batch.block_table
        self._slots = [tables[group].slot_mapping.gpu for group in range(len(runner.attn_groups))]

    def choose(self, num_tokens: int, one_a_row: bool, num_adapters: int) -> Graph:
        """Chooses the graph of a step.

        one_a_row: whether every row feeds one token. num_adapters: LoRA adapters that the tokens use.
        """
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
        """Copies attention's inputs, except block tables, to the buffers that the graph reads."""
        if graph.mode is not CUDAGraphMode.NONE:
            slots = [_put(buffer, of_group) for buffer, of_group in zip(self._slots, slots, strict=True)]
        if graph.is_full:
            query_start, seq_lens = _put(self._query_start, query_start), _put(self._seq_lens, seq_lens)
        return query_start, seq_lens, slots

    def put_inputs(self, graph: Graph, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Copies the model's inputs, [tokens], padded, to the buffers that graphs read.

        Returns them there, and the arguments of the forward context.
        """
        total, padded = len(token_ids), graph.num_tokens
        _put(self._token_ids, token_ids)
        _put(self._positions, positions)
        self._positions[total:padded].zero_()
        # Routers of mixture-of-experts models read this mask, and graphs were captured with padding only. A token that
        # is taken for padding gets no expert.
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
    """Returns the runner's graphs, or None where nothing is captured: on a CPU, and with `enforce_eager`."""
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
