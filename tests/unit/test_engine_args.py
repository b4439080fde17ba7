"""vLLM's engine arguments in the configuration: which are passed on, and that the others are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, TargetConfig, parse_config
from outrider.cluster.engine_args import OWNED, REFUSED, RUN_HERE, Side, about, reason_against, schema
from outrider.deploy.app import describe
from outrider.deploy.preset import Overrides, resolve_config
from tests.unit.test_start_up import heavy_after

SECTIONS = {"target": TargetConfig, "drafter": DraftModelConfig}


def parsed(side: Side, arguments: Any) -> OutriderConfig:
    data: dict[str, dict[str, Any]] = {
        "target": {"model": "t"},
        "drafter": {"method": "draft_model", "model": "d"},
    }
    data[side]["engine_args"] = arguments
    return parse_config(data)


def refusal(side: Side, arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(side, arguments)
    return str(caught.value).removeprefix("config: ")


def tabled() -> list[tuple[Side, str]]:
    sides: tuple[Side, ...] = ("target", "drafter")
    return [(side, name) for side in sides for withheld in (*OWNED[side], *REFUSED[side]) for name in withheld.names]


def test_arguments_are_kept_as_they_are_written() -> None:
    arguments = {
        "kv_cache_dtype": "fp8",
        "block_size": 64,
        "cpu_offload_gb": 1,
        "cpu_offload_params": ["experts"],
        "attention_config": {"flash_attn_version": 3},
        "compilation_config": {"mode": "VLLM_COMPILE", "cudagraph_mode": "PIECEWISE"},
        "hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "attention_backend": "TRITON_ATTN",
        "optimization_level": 2,
        "model_loader_extra_config": {"concurrency": 4},
        "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    }
    config = parsed("target", arguments)
    assert config.target.engine_args == arguments
    assert parse_config(config.model_dump(mode="json")) == config
    assert parsed("drafter", {"kv_cache_dtype": "fp8"}).drafter.engine_args == {"kv_cache_dtype": "fp8"}  # type: ignore[union-attr]


@pytest.mark.parametrize(("side", "name"), tabled())
def test_what_is_not_passed_on_is_refused_by_name_reason_and_fix(side: Side, name: str) -> None:
    text = refusal(side, {name: 1})
    reason = reason_against(side, name)
    assert reason is not None
    assert text == f"{side}.engine_args.{name}: is not passed on to vLLM: {reason}"
    problem, _, fix = reason.partition("; ")
    assert problem
    assert fix
    assert "found" not in refusal(side, {name: "secret"}), "a value that is not asked for is not shown"


@pytest.mark.parametrize("side", SECTIONS)
def test_what_has_a_key_of_its_own_is_refused_with_it(side: Side) -> None:
    own = schema()["properties"].keys() & SECTIONS[side].model_fields
    assert {"model", "dtype", "max_model_len", "kv_cache_memory_bytes", "tensor_parallel_size", "seed"} <= own
    for name in own:
        text = f"{side}.engine_args.{name}: has a key of its own; write it as {side}.{name}"
        assert refusal(side, {name: 1}) == text


def test_reasons_name_keys_that_there_are() -> None:
    for side, name in tabled():
        for section, key in re.findall(r"\b(target|drafter|serving|openai)\.(\w+)", reason_against(side, name) or ""):
            of_section = SECTIONS.get(section) or OutriderConfig.model_fields[section].annotation
            assert key in of_section.model_fields, f"{side}, {name}: {section}.{key}"  # type: ignore[union-attr]


@pytest.mark.parametrize("side", SECTIONS)
def test_tables_name_arguments_that_there_are_once(side: Side) -> None:
    names = [name for of_side, name in tabled() if of_side == side]
    assert sorted(set(names)) == sorted(names)
    assert set(names) <= schema()["properties"].keys()
    passed = {name for name in schema()["properties"] if reason_against(side, name) is None}
    assert RUN_HERE[side] <= passed - SECTIONS[side].model_fields.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache_dtyp": "fp8"}, "kv_cache_dtyp: is not an engine argument of vLLM's; did you mean kv_cache_dtype?"),
        ({"kv-cache-dtype": "fp8"}, "kv-cache-dtype: is not .*; did you mean kv_cache_dtype?"),
        ({"zzzz": 1}, "zzzz: is not an engine argument of vLLM's; remove it or check its spelling"),
        ({"kv_cache_dtype": "fp9"}, r"kv_cache_dtype: must be one of auto, .*fp8_e4m3, .* \(found 'fp9'\)"),
        ({"kv_cache_dtype": 8}, r"kv_cache_dtype: must be one of auto, .*found 8"),
        ({"block_size": "64"}, r"block_size: must be an integer or null \(found '64'\)"),
        ({"block_size": True}, r"block_size: must be an integer or null \(found True\)"),
        ({"enable_expert_parallel": 1}, r"enable_expert_parallel: must be true or false \(found 1\)"),
        ({"cpu_offload_gb": "4 GiB"}, r"cpu_offload_gb: must be a number \(found '4 GiB'\)"),
        ({"cpu_offload_params": "experts"}, r"cpu_offload_params: must be a list, each text \(found 'experts'\)"),
        ({"cudagraph_capture_sizes": [1, "2"]}, r"cudagraph_capture_sizes.1: must be an integer \(found '2'\)"),
        ({"attention_backend": "FLASH"}, r"attention_backend: must be one of FLASH_ATTN, .*found 'FLASH'"),
        ({"load_format": None}, r"load_format: must be text \(found None\)"),
        ({"compilation_config": 3}, r"compilation_config: must be a mapping \(found 3\)"),
        ({"compilation_config": {"mod": 3}}, r"compilation_config.mod: is not a key .*; did you mean mode?"),
        ({"kv_transfer_config": {"kv_rol": 1}}, r"kv_transfer_config.kv_rol: is not a key .*; did you mean kv_role?"),
        ({"kv_transfer_config": {"kv_port": "x"}}, r"kv_transfer_config.kv_port: must be an integer \(found 'x'\)"),
        (
            {"attention_config": {"flash_attn_version": 5}},
            r"attention_config.flash_attn_version: must be one of 2, 3, 4",
        ),
        ({"eplb_config": {"window_size": 0}}, r"eplb_config.window_size: must be an integer above 0 \(found 0\)"),
        ([1], "engine_args: .*dictionary"),
        (None, "engine_args: .*dictionary"),
        ({1: 2}, "engine_args.1"),
    ],
)
def test_unknown_names_and_wrong_types_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"target\.(engine_args\.)?{message}"):
        parsed("target", arguments)


def test_every_wrong_argument_is_listed_at_once() -> None:
    text = refusal("target", {"block_size": "x", "zzz": 1, "seed": 3, "worker_cls": "a{b}"})
    assert all(f"target.engine_args.{name}: " in text for name in ("block_size", "zzz", "seed", "worker_cls"))


@pytest.mark.parametrize("section", [{"method": "ngram"}, {"method": "suffix"}])
def test_a_drafter_without_an_engine_takes_none(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.engine_args: .*without an engine of its own"):
        parse_config({"target": {"model": "t"}, "drafter": {**section, "engine_args": {"block_size": 32}}})


def test_one_in_the_targets_engine_is_sent_there() -> None:
    drafter = {"method": "ngram", "placement": "co_located", "engine_args": {}}
    with pytest.raises(ConfigError, match=r"drafter\.engine_args: .*target\.engine_args"):
        parse_config({"target": {"model": "t"}, "drafter": drafter})


def test_the_line_that_serve_and_doctor_show_has_them() -> None:
    text = describe(parsed("drafter", {"kv_cache_dtype": "fp8"}))
    assert text == "t (tensor parallel 1), drafted for by d (tensor parallel 1, kv_cache_dtype: fp8)"


def test_the_line_that_serve_and_doctor_show_has_the_stages() -> None:
    target = {"model": "t", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert describe(parse_config({"target": target})) == (
        "t (tensor parallel 2 x pipeline parallel 3), without a drafter"
    )


def test_an_override_of_the_checkpoint_keeps_them(tmp_path: Path, outrider_home: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("target: {model: org/m, engine_args: {block_size: 64}}")
    assert resolve_config(str(file), Overrides(target="org/n")).target.engine_args == {"block_size": 64}


def test_checking_them_imports_no_engine() -> None:
    code = """
from outrider.cluster.config import parse_config
parse_config({"target": {"model": "t", "engine_args": {"kv_cache_dtype": "fp8", "attention_config": {}}}})
"""
    assert heavy_after(code) == []


@pytest.mark.parametrize(
    ("error", "path"),
    [
        ("ValueError: Load format `flash` is not supported", "target.engine_args.load_format"),
        ("NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512", "drafter.engine_args.kv_cache_dtype"),
        (
            "1 validation error for CacheConfig block_size Input should be greater than 0",
            "target.engine_args.block_size",
        ),
        ("ValueError: no room for 12 KV blocks", None),
        ("a flashy error", None),
    ],
)
def test_an_engines_error_is_told_under_the_argument_that_it_is_about(error: str, path: str | None) -> None:
    given: dict[Side, dict[str, Any]] = {
        "target": {"load_format": "flash", "block_size": 0, "hf_overrides": {"a": 12}},
        "drafter": {"kv_cache_dtype": "fp8"},
    }
    assert about(error, given) == path
