"""Runs the draft model over rows of paged KV, with vLLM's model, attention metadata and kernels.

A row is some tokens, their first position, and the KV blocks of its sequence. Unlike vLLM's runner it keeps no state of
a row between calls, so a rollback feeds tokens from an earlier position, and a branch is a row with another block
table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from outrider.actors.drafter.engine import StepRow
from outrider.actors.verification.transfer import to_device
from outrider.actors.vllm_adapter.draft_graphs import graphs_of


class PagedForward:
    """Computes one step of the draft model. Every rank of a tensor-parallel model calls it with the same rows."""

    def __init__(self, runner: Any, adapters: Sequence[LoRARequest] = (), mask_id: int = 0) -> None:
        """runner: vLLM's V1 model runner, loaded, with its KV cache and graphs. adapters: the LoRA adapters it has.
        mask_id: the token of masks."""
        self._model, self._config, self._device = runner.model, runner.vllm_config, runner.device
        self._kv_caches = runner.kv_caches
        self._num_blocks: int = runner.kv_cache_config.num_blocks
        self._last_id: int = runner.vllm_config.model_config.get_vocab_size() - 1
        self._groups: list[list[Any]] = runner.attn_groups
        self._graphs = graphs_of(runner)
        self._tables = [
            _BlockTables(index, runner.input_batch.block_table[index], for_graphs=self._graphs is not None)
            for index in range(len(self._groups))
        ]
        self._mask_id = mask_id
        self._adapters = {adapter.lora_int_id: adapter for adapter in adapters}
        self._runner, self._num_used = runner, 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks, given as (from, to) ids, in every layer.

        All are read before any is written, since a block that one copy reads may have been freed for another to write.
        """
        copy_kv_cache_blocks_inplace(self._kv_caches, self._num_blocks, copies)

    def __call__(self, rows: Sequence[StepRow]) -> Tensor:
        """Feeds every row and its masks, and returns the hidden states at which each row draws, in order.

        They have the shape [draws, hidden size].
        """
        batch = _Batch.of(rows, self._mask_id)
        # A target's vocabulary may be padded further than the draft model's, whose last row stands for the rest.
        np.minimum(batch.token_ids, self._last_id, out=batch.token_ids)
        if self._adapters:
            self._choose_adapters(rows)
        total, query_start, seq_lens = len(batch.token_ids), batch.query_start, batch.seq_lens
        max_seq_len = int(seq_lens.max())
        new_tables = [tables.update(rows, max_seq_len) for tables in self._tables]
        slots = [tables.slots(batch.row_of, batch.positions) for tables in self._tables]
        drawn = batch.drawn
        graphs, graph, num_tokens = self._graphs, None, total
        if graphs is not None:
            graph = graphs.choose(total, batch.longest == 1, self._num_used)
            query_start, seq_lens, slots = graph.padded(query_start, seq_lens, slots)
            if graph.is_full:
                num_tokens = graph.num_tokens
        # Everything for the device is sent in one copy, before anything there is waited for.
        sent = iter(
            to_device(
                [
                    *(query_start, seq_lens, batch.token_ids, batch.positions, drawn),
                    *(*slots, *(new for new in new_tables if new is not None)),
                ],
                self._device,
            )
        )
        query_start_t, seq_lens_t, token_ids_t, positions_t, drawn_t = itertools.islice(sent, 5)
        slots_t: Sequence[Tensor] = list(itertools.islice(sent, len(slots)))
        for tables, new in zip(self._tables, new_tables, strict=True):
            if new is not None:
                tables.put(next(sent))
        context: dict[str, Any] = {"num_tokens": total}
        if graphs is not None and graph is not None:
            query_start_t, seq_lens_t, slots_t = graphs.put(graph, query_start_t, seq_lens_t, slots_t)
            token_ids_t, positions_t, context = graphs.put_inputs(graph, token_ids_t, positions_t)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_t,
            query_start_loc_cpu=torch.from_numpy(query_start),
            seq_lens=seq_lens_t,
            seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens),
            num_reqs=len(seq_lens),
            num_actual_tokens=num_tokens,
            max_query_len=batch.longest,
            max_seq_len=max_seq_len,
            block_table_tensor=None,
            slot_mapping=None,
            positions=positions_t[:num_tokens],
        )
        metadata, slots_by_layer = self._by_layer(common, slots_t)
        with set_forward_context(metadata, self._config, slot_mapping=slots_by_layer, **context):
            hidden = self._model(
                input_ids=token_ids_t, positions=positions_t, intermediate_tensors=None, inputs_embeds=None
            )
        assert isinstance(hidden, Tensor)
        return hidden[:total] if len(drawn) == total else hidden[drawn_t]

    def _choose_adapters(self, rows: Sequence[StepRow]) -> None:
        """Sets the LoRA adapter of each token and of each row of logits in vLLM's layers."""
        numbers = [row.adapter if row.adapter in self._adapters else 0 for row in rows]
        of_tokens = tuple(number for number, row in zip(numbers, rows, strict=True) for _ in range(row.num_fed))
        of_draws = tuple(number for number, row in zip(numbers, rows, strict=True) for _ in row.draws)
        used = {self._adapters[number] for number in set(numbers) if number}
        self._runner._set_active_loras(of_draws, of_tokens, used)
        self._num_used = len(used)

    def _by_layer(
        self, common: CommonAttentionMetadata, slots: Sequence[Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns attention metadata and KV slots by layer.

        common: metadata without block tables and slots. slots: int64 [tokens] of each KV cache group, padded for a
        graph.
        """
        metadata: dict[str, Any] = {}
        slots_by_layer: dict[str, Tensor] = {}
        for groups, tables, slot_t in zip(self._groups, self._tables, slots, strict=True):
            of_group = replace(
                common,
                block_table_tensor=tables.on_device(common.num_reqs),
                slot_mapping=slot_t[: common.num_actual_tokens],
            )
            for group in groups:
                built = group.build_metadata(of_group)
                for name in group.layer_names:
                    metadata[name], slots_by_layer[name] = built, slot_t
        return metadata, slots_by_layer


@dataclass(frozen=True, slots=True)
class _Batch:
    """Holds the tokens of all rows and their masks, concatenated.

    query_start: int32 [rows + 1]; seq_lens: int32 [rows], including the tokens fed; row_of, positions: [tokens]; drawn:
    int64 [draws], the tokens after which something is drawn.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    row_of: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    longest: int
    drawn: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[StepRow], mask_id: int) -> _Batch:
        count = len(rows)
        starts = np.array([row.start for row in rows], np.int64)
        lengths = [row.num_fed for row in rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        drawn = np.array(
            [end - back for row, end in zip(rows, ends, strict=True) for back in range(len(row.draws), 0, -1)], np.int64
        )
        longest, seq_lens = max(lengths), (starts + lengths).astype(np.int32)
        if longest == 1:
            tokens = np.array([row.token_ids[0] for row in rows], np.int32)
            return cls(tokens, starts, np.arange(count), np.arange(count + 1, dtype=np.int32), seq_lens, 1, drawn)
        query_start = np.zeros(count + 1, np.int32)
        query_start[1:] = ends
        row_of = np.repeat(np.arange(count), lengths)
        positions = (starts - query_start[:-1])[row_of] + np.arange(sum(lengths))
        fed = [[*row.token_ids, *[mask_id] * row.num_masks] if row.num_masks else row.token_ids for row in rows]
        tokens = np.concatenate([np.asarray(of_row, np.int32) for of_row in fed])
        return cls(tokens, positions, row_of, query_start, seq_lens, longest, drawn)


class _BlockTables:
    """Keeps one KV cache group's block tables from step to step, while its rows have the same blocks."""

    def __init__(self, group: int, tables: Any, for_graphs: bool) -> None:
        """tables: the group's tables of vLLM's runner, which CUDA graphs read; not written without graphs."""
        self._group, self._block_size = group, tables.block_size
        self._read_by_graphs = tables if for_graphs else None
        self._kept: list[Sequence[int]] = []
        self._table = np.zeros((0, 0), np.int32)
        self._sent = torch.from_numpy(self._table)

    def update(self, rows: Sequence[StepRow], max_seq_len: int) -> np.ndarray | None:
        """Returns the block ids of each row, int32 [rows, width], for `put`; None if the device has them."""
        width = -(-max_seq_len // self._block_size)
        blocks = [row.block_ids[self._group] for row in rows]
        # Within one process the lists are the same objects, so comparing them is fast.
        if blocks == self._kept and width == self._table.shape[1]:
            return None
        self._kept, self._table = blocks, np.zeros((len(rows), width), np.int32)
        for row, ids in zip(self._table, blocks, strict=True):
            row[: min(len(ids), width)] = ids[:width]
        return self._table

    def put(self, sent: Tensor) -> None:
        """Takes the result of `update`, on the device."""
        if self._read_by_graphs is None:
            self._sent = sent
            return
        num_rows, width = sent.shape
        self._read_by_graphs.get_device_tensor(num_rows)[:, :width].copy_(sent, non_blocking=True)

    def on_device(self, num_rows: int) -> Tensor:
        """Returns the tables, int32 [num_rows, width], with the null block in padding rows."""
        if self._read_by_graphs is None:
            return self._sent
        tables: Tensor = self._read_by_graphs.get_device_tensor(num_rows)
        tables[len(self._kept) :].fill_(NULL_BLOCK_ID)
        return tables

    def slots(self, row_of: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the KV slot of each token, int64 [tokens], for the rows of the last `update`."""
        size = self._block_size
        return self._table[row_of, positions // size].astype(np.int64) * size + positions % size
