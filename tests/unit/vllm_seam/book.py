"""What tests of a whole scheduler have in common: a model that is a function of all tokens before it, so that a wrong
position anywhere changes the answer, and vLLM's scheduler with ours in front, without an engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

K = 4
EOS = 7
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


def next_token(tokens: list[int]) -> int:
    """Of a model that reads all of them. One token in twelve ends the answer."""
    mixed = 0
    for token in tokens:
        mixed = (mixed * 31 + token * 17 + 5) % 1_000_003
    return EOS if mixed % 12 == 0 else 10 + mixed % 90


def make_scheduler(vllm_config: Any, blocks: int) -> Any:
    vllm_config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def ask(number: int, prompt: list[int], max_tokens: int, **ours: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[EOS], extra_args={"outrider": ours})
    return Request(f"r{number}", prompt, params, None)
