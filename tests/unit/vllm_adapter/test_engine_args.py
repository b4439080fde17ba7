"""Engine arguments of the configuration reach the installed vLLM, and its refusals name them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from outrider.actors.vllm_adapter import engine_args
from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config, target_engine_arguments, target_vllm_config
from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, parse_config
from outrider.cluster.placement import RankPlacement
from tests.support.models.tiny_models import build_tiny_llama

RANKS = RankPlacement("local", ["Verifier:test"], [0], None, {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


def of_target(checkpoint: str, **arguments: Any) -> OutriderConfig:
    return parse_config({"target": {"model": checkpoint, "dtype": "float32", "engine_args": arguments}})


def test_they_reach_the_targets_engine(checkpoint):
    arguments = {
        "block_size": 64,
        "prefix_caching_hash_algo": "sha256_cbor",
        "load_format": "safetensors",
        "hf_overrides": {
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "max_position_embeddings": 4096,
        },
        "enable_chunked_prefill": True,
        "kv_cache_metrics": True,
        "attention_config": {"flash_attn_version": 3},
        "compilation_config": {"cudagraph_mode": "NONE"},
    }
    made = target_vllm_config(of_target(checkpoint, **arguments), RANKS, None)
    assert (made.cache_config.block_size, made.cache_config.prefix_caching_hash_algo) == (64, "sha256_cbor")
    assert made.load_config.load_format == "safetensors"
    assert made.model_config.max_model_len == 4096
    assert made.model_config.hf_config.rope_parameters["rope_theta"] == 100.0
    assert made.observability_config.kv_cache_metrics
    assert made.attention_config.flash_attn_version == 3, "a mapping stands for vLLM's own configuration"
    assert made.additional_config["outrider"]["target"]["engine_args"] == arguments, "and its ranks know them"


def test_they_reach_a_draft_models_engine(checkpoint):
    config = DraftModelConfig(
        method="draft_model",
        model=checkpoint,
        dtype="float32",
        engine_args={"num_gpu_blocks_override": 40, "load_format": "safetensors"},
    )
    made = drafter_vllm_config(config, None, None)
    assert made.cache_config.num_gpu_blocks_override == 40
    assert made.load_config.load_format == "safetensors"
    assert made.parallel_config.worker_cls.endswith("DraftWorker")


@pytest.fixture
def gpu(monkeypatch):
    """What vLLM's configuration asks of a platform that captures graphs."""
    monkeypatch.setattr(engine_args, "on_gpu", lambda: True)
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))


def captured(checkpoint, **section):
    """Returns vLLM's mode of the graphs that the draft model captures."""
    config = DraftModelConfig(method="draft_model", model=checkpoint, kv_cache_memory_bytes=1 << 26, **section)
    return drafter_vllm_config(config, None, None).compilation_config.cudagraph_mode.name


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "FULL_AND_PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "NONE"),
        ({"enforce_eager": True}, "NONE"),
    ],
)
def test_on_a_gpu_a_draft_model_captures_whole_decode_steps_unless_it_is_told_otherwise(gpu, checkpoint, given, mode):
    assert captured(checkpoint, engine_args=given) == mode


@pytest.mark.parametrize(("written", "tokens"), [({}, 8192), ({"max_num_batched_tokens": 512}, 512)])
def test_on_a_gpu_a_target_s_step_has_as_many_tokens_as_vllm_serve_s(gpu, monkeypatch, checkpoint, written, tokens):
    by_usage = {UsageContext.OPENAI_API_SERVER: 8192, UsageContext.LLM_CLASS: 16384}, {}  # vLLM's of an H100
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", classmethod(lambda cls, world_size: by_usage))
    made = target_vllm_config(parse_config({"target": {"model": checkpoint, **written}}), RANKS, None)
    assert made.scheduler_config.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, r"target\.engine_args\.block_size: .*greater than 0"),
        ({"no_such_thing": 1}, r"target\.engine_args\.no_such_thing: TypeError: .*unexpected keyword argument"),
        ({"enable_expert_parallel": True}, r"target\.engine_args\.enable_expert_parallel: .*leave it out on CPU"),
        ({"enable_chunked_prefill": False}, r"target: .*max_num_batched_tokens .*\(with engine_args enable_chunked"),
        (
            {"hf_overrides": {"rope_parameters": {"rope_theta": 1.0}}},
            r"target: KeyError: 'rope_type' \(with engine_args hf_overrides\)",
        ),
        ({"moe_backend": "triton", "hf_config_path": "/nowhere"}, r"target\.engine_args\.hf_config_path: .*/nowhere"),
    ],
)
def test_what_vllm_refuses_when_the_engine_is_made_is_told_by_name(checkpoint, arguments, message):
    config = of_target(checkpoint, **arguments)
    config = config.model_copy(update={"target": config.target.model_copy(update={"max_num_batched_tokens": 64})})
    with pytest.raises(ConfigError, match=message):
        target_vllm_config(config, RANKS, None)


@pytest.mark.parametrize(("gpu", "slots"), [(True, 3), (False, 4)])
def test_every_adapter_has_a_slot_and_on_cpu_one_stays_empty(monkeypatch, gpu, slots):
    """vLLM's CPU kernels answer with the last slot's where a request names none."""
    monkeypatch.setattr(engine_args, "on_gpu", lambda: gpu)
    given = {"lora_modules": [{"name": "a", "path": "/a"}], "engine_args": {"max_lora_rank": 32, "max_loras": 3}}
    arguments = target_engine_arguments(parse_config({"target": {"model": "m", **given}}))
    assert arguments["enable_lora"] is True
    assert (arguments["max_loras"], arguments["max_cpu_loras"], arguments["max_lora_rank"]) == (slots, slots, 32)
