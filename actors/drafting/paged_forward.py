"""One lean forward pass of the draft model over rows of paged KV: vLLM's model, attention metadata and kernels, without
its runner's per-request state.

A row is some tokens, where they stand and which KV blocks its sequence has. Nothing of a row is kept between calls, so
a rollback is feeding from an earlier position, and a branch is a row with another block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from actors.drafting.step_plan import StepRow


class PagedForward:
    """Owned by one rank; every rank of a tensor-parallel draft model calls it with the same rows."""

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's V1 model runner, loaded and with its KV cache."""
        self._model, self._config, self._device = runner.model, runner.vllm_config, runner.device
        self._kv_caches = runner.kv_caches
        self._num_blocks: int = runner.kv_cache_config.num_blocks
        self._groups: list[list[Any]] = runner.attn_groups
        self._block_sizes: list[int] = [runner.input_batch.block_table[i].block_size for i in range(len(self._groups))]
        self._graphs = _PiecewiseGraphs(runner) if self._device.type != "cpu" else None

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole KV blocks, (from, to) ids, in every layer."""
        copy_kv_cache_blocks_inplace(self._kv_caches, self._num_blocks, copies)

    def __call__(self, rows: Sequence[StepRow]) -> Tensor:
        """Feed every row, guesses included. Returns the hidden states that are drawn from, [draws, hidden size]: those
        after the last tokens of each row, as many as it has draws."""
        device = self._device
        lengths = np.fromiter((row.num_fed for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        total, longest = int(query_start[-1]), int(lengths.max())
        if longest == 1:
            row_of, positions = np.arange(len(rows)), starts.astype(np.int64)
            tokens = np.fromiter((row.token_ids[0] for row in rows), np.int32, len(rows))
        else:
            row_of = np.repeat(np.arange(len(rows)), lengths)
            positions = (starts - query_start[:-1])[row_of].astype(np.int64) + np.arange(total)
            tokens = np.concatenate([np.asarray([*row.token_ids, *row.guesses], np.int32) for row in rows])
        seq_lens = starts + lengths
        max_seq_len = int(seq_lens.max())
        on_host = torch.from_numpy(query_start)
        query_start_loc, seq_lens_t = on_host.to(device), torch.from_numpy(seq_lens).to(device)
        metadata: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        for index, groups in enumerate(self._groups):
            table = self._table(rows, index, max_seq_len)
            size = self._block_sizes[index]
            slot = table[row_of, positions // size].astype(np.int64) * size + positions % size
            slot_t = torch.from_numpy(slot).to(device)
            common = CommonAttentionMetadata(
                query_start_loc=query_start_loc,
                query_start_loc_cpu=on_host,
                seq_lens=seq_lens_t,
                seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens),
                num_reqs=len(rows),
                num_actual_tokens=total,
                max_query_len=longest,
                max_seq_len=max_seq_len,
                block_table_tensor=torch.from_numpy(table).to(device),
                slot_mapping=slot_t,
            )
            for group in groups:
                built = group.build_metadata(common)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, slot_t
        hidden = self._forward(tokens, positions, metadata, slots)
        drawn = [
            position
            for row, end in zip(rows, query_start[1:].tolist(), strict=True)
            for position in range(end - len(row.draws), end)
        ]
        return hidden if len(drawn) == total else hidden[torch.tensor(drawn, dtype=torch.int64, device=device)]

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, metadata: dict[str, Any], slots: dict[str, Tensor]
    ) -> Tensor:
        total = len(tokens)
        token_ids, places = torch.from_numpy(tokens), torch.from_numpy(positions)
        context: dict[str, Any] = {"num_tokens": total}
        if self._graphs is not None:
            token_ids, places, context = self._graphs.pad(token_ids, places)
        with set_forward_context(metadata, self._config, slot_mapping=slots, **context):
            hidden = self._model(input_ids=token_ids, positions=places, intermediate_tensors=None, inputs_embeds=None)
        assert isinstance(hidden, Tensor)
        return hidden[:total]

    def _table(self, rows: Sequence[StepRow], group: int, max_seq_len: int) -> np.ndarray:
        """int32 [rows, width]: block ids of one KV group."""
        width = -(-max_seq_len // self._block_sizes[group])
        table = np.zeros((len(rows), width), np.int32)
        for index, row in enumerate(rows):
            blocks = row.block_ids[group][:width]
            table[index, : len(blocks)] = blocks
        return table


class _PiecewiseGraphs:
    """GPU: the CUDA graphs that vLLM captured for the model's pieces between attention layers, used where they fit."""

    def __init__(self, runner: Any) -> None:
        self._dispatcher, self._token_ids, self._positions = (
            runner.cudagraph_dispatcher,
            runner.input_ids.gpu,
            runner.positions,
        )

    def pad(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The inputs, [tokens], in the buffers the graphs were captured with, and what the forward context is told."""
        total = len(token_ids)
        mode, descriptor = self._dispatcher.dispatch(total, valid_modes={CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE})
        padded = descriptor.num_tokens
        self._token_ids[:total].copy_(token_ids, non_blocking=True)
        self._positions[:total].copy_(positions, non_blocking=True)
        self._positions[total:padded].zero_()
        context = {"num_tokens": padded, "cudagraph_runtime_mode": mode, "batch_descriptor": descriptor}
        return self._token_ids[:padded], self._positions[:padded], context
