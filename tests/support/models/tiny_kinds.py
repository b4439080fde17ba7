"""Tiny random-weight checkpoints of other kinds than tiny_models.py has: experts, latent attention (MLA), layers
that see a window of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.models.tiny_models import EOS, VOCAB_SIZE, _byte_tokenizer, build_tiny_llama

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}


def build_tiny_moe(path: Path, *, noise_of: Path | None = None, noise: float = 0.0) -> Path:
    """Mixtral with four experts, two of them a token. noise_of, noise: as for `build_tiny_llama`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    if noise_of is not None:
        return build_tiny_llama(path, noise_of=noise_of, noise=noise)
    config = MixtralConfig(**_COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return _write(path, MixtralForCausalLM(config))


def build_tiny_mla(path: Path, *, noise_of: Path | None = None, noise: float = 0.0) -> Path:
    """DeepSeek V2 without experts. Its latent vectors are as long as vLLM's kernels want them. noise_of, noise: as for
    `build_tiny_llama`."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    if noise_of is not None:
        return build_tiny_llama(path, noise_of=noise_of, noise=noise)
    config = DeepseekV2Config(
        **_COMMON,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    return _write(path, DeepseekV2ForCausalLM(config))


def _write(path: Path, model: Any) -> Path:
    """Weights as wide as those of `build_tiny_llama`, and its tokenizer. Of printable ASCII alone, likewise."""
    generator = torch.Generator().manual_seed(len(path.name))
    for parameter in model.float().parameters():
        if parameter.dim() >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    head = model.lm_head.weight.data
    head *= 2.0
    head[:32] = head[127:] = 0.0
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path
