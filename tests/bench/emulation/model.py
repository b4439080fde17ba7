"""A vLLM model that takes a device's time instead of computing. Its logits are a function of its input ids.

One layer of vLLM's own attention runs for real, so KV blocks, block tables, slot mappings and attention metadata are
all used as a model's would be; its output is dropped. A row's hidden state carries its likeliest next tokens in its
first columns, a byte each: exact in every float type, through every slice and copy that vLLM makes of it. They are
worked out while the device's time runs, in the place of a host that launches kernels; nobody waits here (`device.py`).

Shapes: N tokens of a step, H hidden size, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import maybe_prefix

from tests.bench.emulation.checkpoint import FIRST_WRITTEN_ID
from tests.bench.emulation.device import DEVICE, install_reads
from tests.bench.emulation.emulation import KEY, Emulation
from tests.bench.emulation.text_process import NUM_RANKED, TokenRange, ranked_tokens
from tests.bench.emulation.trace import TraceWriter

ID_BYTES = 3

RANKED_LOGITS = (24.0, 16.0, 8.0)
"""Logits of a row's likeliest tokens; all others have 0. Far apart, so that sampling at temperature 1 is nearly
greedy: both models give their choice 0.9997, and the overlap of p and q is 1 where they agree and 0.0003 or less where
they do not. Acceptance at temperature 1 is then the greedy one to three digits."""


class EmulatedForCausalLM(nn.Module):
    """Registered with vLLM by `tests.bench.emulation.plugin`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.emulation = Emulation.from_json(getattr(config, KEY))
        self.vocab_size: int = config.vocab_size
        self.tokens = TokenRange.of(FIRST_WRITTEN_ID, config.vocab_size)
        self.attention = Attention(
            config.num_attention_heads,
            config.head_dim,
            scale=config.head_dim**-0.5,
            num_kv_heads=config.num_key_value_heads,
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, "model.layers.0.self_attn.attn"),
        )
        self.anchor = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False)
        self.ranked_logits = torch.tensor(RANKED_LOGITS)
        trace = self.emulation.trace
        self._trace = None if trace is None else TraceWriter(trace, self.emulation.role)
        install_reads()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Not used by forward, asked for by vLLM. Returns [N, H]."""
        return self.anchor.expand(len(input_ids), -1)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """input_ids, positions: [N]. Returns [N, H]."""
        called = DEVICE.now()
        hidden = self.anchor.new_zeros(len(input_ids), len(self.anchor))
        of = self.emulation
        ranked = ranked_tokens(input_ids.long(), positions.long(), self.tokens, of.follows, of.mask_token)
        hidden[:, : NUM_RANKED * ID_BYTES] = _to_bytes(ranked)
        key_width = self.attention.num_kv_heads * self.attention.head_size
        keys = hidden[:, :key_width].contiguous()
        self.attention(hidden, keys, keys)
        seconds = self.emulation.time.step_ms(len(input_ids)) * 1e-3
        DEVICE.enqueue(called, seconds, self._trace, input_ids.numpy().copy(), positions.numpy().copy())
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
        """hidden_states: [R, H]. Returns float32 [R, V]: zeros but for the ranked tokens."""
        DEVICE.has_results()
        ranked = _from_bytes(hidden_states[:, : NUM_RANKED * ID_BYTES])
        logits = torch.zeros(len(hidden_states), self.vocab_size)
        return logits.scatter_(1, ranked, self.ranked_logits.expand(ranked.shape))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


_SHIFTS = torch.arange(ID_BYTES) * 8


def _to_bytes(ids: torch.Tensor) -> torch.Tensor:
    """Base 256, lowest first. ids: int64 [R, ranks]. Returns [R, ranks * ID_BYTES]."""
    return ((ids[:, :, None] >> _SHIFTS) & 0xFF).flatten(1)


def _from_bytes(columns: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_bytes`, from columns of any type."""
    return (columns.long().unflatten(1, (-1, ID_BYTES)) << _SHIFTS).sum(-1)
