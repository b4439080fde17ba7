"""Provides vLLM's scheduler with our mixins, and a model, for tests without an engine.

The model's next token depends on all tokens before it, so a wrong position anywhere changes the answer.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.vllm_adapter.engine_args import target_vllm_config
from outrider.cluster.config import parse_config
from outrider.cluster.placement import RankPlacement
from tests.support.models.tiny_models import build_tiny_llama

K = 4
EOS = 7
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4


def next_token(tokens: list[int]) -> int:
    """Returns the model's next token. One in twelve ends the answer."""
    mixed = 0
    for token in tokens:
        mixed = (mixed * 31 + token * 17 + 5) % 1_000_003
    return EOS if mixed % 12 == 0 else 10 + mixed % 90


def kv_cache(blocks: int, block_size: int = BLOCK_SIZE) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def make_scheduler(vllm_config: Any, blocks: int) -> Any:
    """Makes a scheduler to which requests arrive a tenth of a millisecond apart, since that decides on preemptions."""
    arrivals = itertools.count()
    vllm_config.cache_config.num_gpu_blocks = blocks
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache(blocks),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
        arrival_clock=lambda: next(arrivals) / 1e4,
    )


def ask(number: int, prompt: list[int], max_tokens: int, **ours: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[EOS], extra_args={"outrider": ours})
    return Request(f"r{number}", prompt, params, None)


def ahead_config(directory: Path, num_paths: int = 1, **target: Any) -> Any:
    """Returns the VllmConfig of an engine that schedules one step ahead, and writes its tiny model to directory.

    target: fields of its configuration.
    """
    model = str(build_tiny_llama(directory / "tiny"))
    drafter = {"method": "ngram"} if num_paths == 1 else {"method": "draft_model", "model": model}
    fields: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "engine_args": {"enable_prefix_caching": False},
    }
    config = parse_config(
        {
            "target": {**fields, **target},
            "drafter": drafter,
            "speculation": {"num_speculative_tokens": K, "num_paths": num_paths},
            "serving": {"structured_output": "off"},
        }
    )
    made = target_vllm_config(config, RankPlacement("local", ["Verifier:test"], [0], None, {}), None)
    assert made.max_concurrent_batches == 2
    return made


def serve(
    scheduler: Any, rank: Any, requests: list[Request], chance: random.Random, aborts: int = 0, most: int = 3
) -> Any:
    """Serves requests as vLLM's core does with two batches in its queue, and returns tokens by request.

    rank: runs a step. most: the number of requests up to which one joins in every step.
    """
    waiting, flying, texts = deque(requests), deque[Any](), {request.request_id: [] for request in requests}
    for _ in range(5000):
        while waiting and (len(scheduler.requests) < most or chance.random() < 0.3):
            scheduler.add_request(waiting.popleft())
        if scheduler.has_requests():
            scheduled = scheduler.schedule()
            counts = dict(scheduled.num_scheduled_tokens)
            flying.append((scheduled, SimpleNamespace(**vars(scheduled)), counts))
            if len(flying) < 2 and (counts or scheduler.has_requests()):
                continue
        if not flying:
            break
        scheduled, told, counts = flying.popleft()
        # The ranks have a copy of their own.
        mine = SchedulerOutput(**vars(told))
        mine.num_scheduled_tokens = dict(counts)
        mine.scheduled_spec_decode_tokens = dict(told.scheduled_spec_decode_tokens)
        output = rank.run(mine)
        if aborts and chance.random() < 0.1 and scheduler.requests:
            aborts -= 1
            scheduler.finish_requests(chance.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        for of_client in scheduler.update_from_output(scheduled, output).values():
            for each in of_client.outputs:
                texts[each.request_id] += each.new_token_ids
    else:
        raise AssertionError("not done after 5000 steps")
    return texts
