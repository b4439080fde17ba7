"""vLLM's arguments and flags, as the configurations they stand for."""

from __future__ import annotations

import argparse
import json

import pytest
import yaml
from vllm import SamplingParams as VllmSamplingParams

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy.cli.serve import as_yaml
from outrider.deploy.llm.arguments import config_from_arguments
from outrider.deploy.llm.flags import config_from_flags

METHODS = {
    "ngram": ({"method": "ngram", "prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    "ngram, short": ({"method": "ngram", "prompt_lookup_max": 1}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}),
    "suffix": ({"method": "suffix", "num_speculative_tokens": 15}, {"method": "suffix", "placement": "with_target"}),
    "draft model": (
        {"method": "draft_model", "model": "d", "draft_tensor_parallel_size": 2, "quantization": "fp8"},
        {"tensor_parallel_size": 2, "engine_args": {"quantization": "fp8"}, "placement": "with_target"},
    ),
    "a model alone": ({"model": "org/small"}, {"method": "draft_model", "model": "org/small"}),
    "padding is vLLM's own": (
        {"method": "draft_model", "model": "d", "disable_padded_drafter_batch": True},
        {"engine_args": {}},
    ),
    "eagle": (
        {"method": "eagle", "model": "e", "draft_tensor_parallel_size": 1},
        {"placement": "co_located", "method": "eagle", "draft_tensor_parallel_size": 1},
    ),
    "mlp": (
        {"method": "mlp", "model": "m", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
        {"method": "mlp_speculator", "model": "m", "revision": None},
    ),
    "mlp by its name": (
        {"model": "ibm-ai-platform/llama3-8b-accelerator", "draft_tensor_parallel_size": 1},
        {"method": "mlp_speculator"},
    ),
    "drafting in one pass": (
        {"method": "draft_model", "model": "d", "parallel_drafting": True},
        {"placement": "with_target", "parallel_drafting": True},
    ),
    "drafting in one pass beside the target": (
        {"method": "draft_model", "model": "d", "parallel_drafting": True, "placement": "co_located"},
        {"placement": "co_located", "parallel_drafting": True},
    ),
    "mtp, as guides write it": (
        {"method": "deepseek_mtp", "num_speculative_tokens": 2, "disable_padded_drafter_batch": "False"},
        {"placement": "co_located", "method": "deepseek_mtp", "disable_padded_drafter_batch": "False"},
    ),
}


@pytest.mark.parametrize(("given", "section"), METHODS.values(), ids=METHODS)
def test_each_method_runs_where_it_can(given, section):
    drafter = config_from_arguments("t", given, tensor_parallel_size=4).drafter
    found = drafter.model_dump()
    assert {name: found[name] for name in section} == section


def test_engine_arguments_keep_vllms_names():
    config = config_from_arguments(
        "t",
        {"method": "ngram", "num_speculative_tokens": 3, "verification": "coupled"},
        tensor_parallel_size=2,
        max_model_len=512,
        enforce_eager=True,
        seed=3,
    )
    assert (config.target.tensor_parallel_size, config.target.max_model_len) == (2, 512)
    assert config.target.engine_args == {"enforce_eager": True, "seed": 3}
    assert (config.num_speculative_tokens, config.speculation.verification) == (3, "coupled")
    assert config_from_arguments("t").drafter is None


WRONG = {
    "a name of former versions": ({"speculative_model": "d"}, None, "speculative_model: .* speculative_config"),
    "what Outrider decides": ({"worker_cls": "x"}, None, "^worker_cls: "),
    "a wrong value": ({"tensor_parallel_size": 0}, None, "^tensor_parallel_size: "),
    "replicas": ({"data_parallel_size": 2}, None, "^data_parallel_size: .* --num-replicas"),
    "no method": ({}, {"num_speculative_tokens": 3}, "^speculative_config.method: "),
    "too many tokens": ({}, {"method": "ngram", "num_speculative_tokens": 99}, "^speculative_config.num_spec"),
    "an argument of nobody's": ({}, {"method": "ngram", "promt_lookup_max": 3}, "promt_lookup_max"),
}


@pytest.mark.parametrize(("arguments", "speculative", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_told_by_its_name(arguments, speculative, error):
    with pytest.raises(ConfigError, match=error):
        config_from_arguments("t", speculative, **arguments)


def test_sampling_parameters_are_vllms_but_for_former_names():
    assert isinstance(SamplingParams(max_tokens=3), VllmSamplingParams)
    assert isinstance(VllmSamplingParams(), SamplingParams)
    with pytest.raises(TypeError, match=r"speculative_model: .* speculative_config"):
        SamplingParams(speculative_model="d", speculative_ratio=4)


def flags(*words, **own):
    empty = dict.fromkeys(
        ["drafter", "drafter_tensor_parallel_size", "drafter_placement", "num_replicas", "dtype", "grpc_port"]
    )
    return argparse.Namespace(**{**empty, **own}), list(words)


def test_flags_of_vllm_serve_reach_the_sections_they_belong_to():
    own, words = flags(
        *["--tensor-parallel-size", "4", "--data-parallel-size", "1", "--max-model-len", "32k"],
        *["--served-model-name", "m", "--port", "8100"],
        *["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'],
        *["--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}', "--enable-auto-tool-choice", "--seed", "7"],
        *[
            "--api-key",
            "k",
            "--allowed-origins",
            '["https://a.example"]',
            "--lora-modules",
            "a=/tmp",
            "--no-enable-log-deltas",
        ],
        num_replicas=2,
        grpc_port=9100,
    )
    config = config_from_flags("org/t", own, words)
    assert (config.target.tensor_parallel_size, config.target.max_model_len) == (4, 32_000)
    assert config.target.engine_args == {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}, "seed": 7}
    assert [module.name for module in config.target.lora_modules] == ["a"]
    assert (config.drafter.method, config.num_speculative_tokens) == ("ngram", 3)
    assert (config.serving.gateway.http_port, config.serving.gateway.grpc_port) == (8100, 9100)
    assert (config.served_model_name, config.serving.api_key, config.serving.num_replicas) == ("m", "k", 2)
    assert config.serving.allowed_origins == ["https://a.example"]
    assert config.openai.frontend_args == {"enable_auto_tool_choice": True, "enable_log_deltas": False}
    assert parse_config(yaml.safe_load(as_yaml(config)), "--print-config").target == config.target


def test_a_drafter_by_flags():
    own, words = flags(drafter="org/d", drafter_tensor_parallel_size=2, drafter_placement="pool")
    drafter = config_from_flags("org/t", own, words).drafter
    assert (drafter.model, drafter.tensor_parallel_size, drafter.placement) == ("org/d", 2, "pool")
    own, words = flags(drafter_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--drafter-tensor-parallel-size: there is no drafter"):
        config_from_flags("org/t", own, words)


def test_a_speculator_names_target_method_and_length(tmp_path):
    proposals = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    section = {"algorithm": "eagle3", "proposal_methods": proposals, "verifier": {"name_or_path": "org/target"}}
    (tmp_path / "config.json").write_text(json.dumps({"speculators_config": section}))
    config = config_from_flags(str(tmp_path), *flags())
    assert (config.target.model, config.drafter.method, config.num_speculative_tokens) == ("org/target", "eagle3", 3)
    assert config.drafter.model == str(tmp_path)


WRONG_FLAGS = {
    "a socket": (["--uds", "/tmp/socket"], "^--uds: has no effect here; .*--port"),
    "replicas": (["--data-parallel-size", "2"], "^--data-parallel-size: .* --num-replicas N"),
    "the worker": (["--worker-cls", "x"], "^--worker-cls: .* leave it out"),
    "a drafter's key": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 99}'],
        "^--speculative-config.num_speculative_tokens: ",
    ),
}


@pytest.mark.parametrize(("words", "error"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_a_wrong_flag_is_told_by_its_name_and_says_what_to_write(words, error):
    with pytest.raises(ConfigError, match=error):
        config_from_flags("org/t", *flags(*words))


def test_a_checkpoint_directory_is_found_from_anywhere_and_a_missing_one_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    relative = f"./{tmp_path.name}"
    config = config_from_arguments(relative, {"method": "draft_model", "model": relative})
    assert (config.target.model, config.drafter.model) == (str(tmp_path), str(tmp_path))
    with pytest.raises(ConfigError, match=r"^speculative_config.model: /no/such does not exist"):
        config_from_arguments(relative, {"method": "draft_model", "model": "/no/such"})


async def test_sleep_that_gives_no_memory_back_is_refused():
    with pytest.raises(NotImplementedError, match=r"on CPU .* level=0"):
        LLM.sleep(None)
    with pytest.raises(NotImplementedError, match=r"on CPU .* level=0"):
        await AsyncLLM.sleep(None)
