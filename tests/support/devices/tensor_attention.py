"""An attention backend for vLLM whose metadata are tensors alone, so that a step can be run again with another's, as a
CUDA graph does. In torch, for any block size; for tests on a CPU in one process.

As GPU kernels do, a pass of one token a row reads by `seq_lens`, whatever `query_start_loc` says, and writes wherever a
slot is not negative; the builder keeps a plan in a tensor of its own, as FlashAttention 3 and FlashInfer do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

READ: set[int] = set()
"""KV blocks that attention has looked into, of all layers; for the test to empty."""


class TensorAttention(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder


@dataclass
class Metadata:
    """num_blocks: int32 [rows], how many of each row's table are read: the builder's."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_blocks: torch.Tensor
    causal: bool = True


class Builder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = kv_cache_spec.block_size
        self._num_blocks = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        rows = common.num_reqs
        self._num_blocks[:rows] = (common.seq_lens + self._block_size - 1) // self._block_size
        self._num_blocks[rows:] = 0
        return Metadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            self._num_blocks[:rows],
        )


def keys_and_values(kv_cache):
    """[blocks, heads, tokens of a block, head size], both."""
    blocks, heads, size, _ = kv_cache.shape
    return kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)


class Impl(CPUAttentionBackendImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        size = kv_cache.shape[2]
        real = slot_mapping >= 0
        blocks, places = slot_mapping[real] // size, slot_mapping[real] % size
        for cache, new in zip(keys_and_values(kv_cache), (key, value), strict=True):
            cache[blocks, :, places] = new[: len(slot_mapping)][real].to(cache.dtype)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        if attn_metadata is None:
            return output
        told = attn_metadata
        assert told.num_actual_tokens <= len(query)
        starts = list(range(len(told.seq_lens) + 1)) if told.max_query_len == 1 else told.query_start_loc.tolist()
        for row, (length, first, end) in enumerate(zip(told.seq_lens.tolist(), starts[:-1], starts[1:], strict=True)):
            if length:
                output[first:end] = self._row(query[first:end], kv_cache, told, row, length)
            else:
                output[first:end] = 0
        return output

    def _row(self, query, kv_cache, told, row, length):
        count, size = len(query), kv_cache.shape[2]
        window = self.sliding_window if self.sliding_window > 0 else length
        first = max(length - count - window + 1, 0) // size
        blocks = told.block_table[row, first : int(told.num_blocks[row])].long()
        READ.update(blocks.tolist())
        keys, values = (
            each[blocks].transpose(1, 2).flatten(0, 1).float().repeat_interleave(self.num_queries_per_kv, 1)
            for each in keys_and_values(kv_cache)
        )
        places = first * size + torch.arange(len(keys))
        asked = length - count + torch.arange(count).unsqueeze(1)
        seen = (places <= asked) & (places > asked - window)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * self.scale
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, values).to(query.dtype)
