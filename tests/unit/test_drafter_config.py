"""The drafter section: where each method runs, vLLM's keys by their names, and what is refused with which reason."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.co_located_config import (
    CO_LOCATED_METHODS,
    GPU_ONLY_METHODS,
    MTP_ALIAS,
    REFUSED_KEYS,
    REFUSED_METHODS,
    CoLocatedConfig,
)
from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, SuffixConfig, parse_config
from outrider.cluster.drafter_config import REMOTE_METHODS, check_build_drafts
from outrider.cluster.placement import placement_of, plan_cores

SOURCE = Path(next(iter(find_spec("vllm").submodule_search_locations))) / "config" / "speculative.py"


def parsed(drafter: dict[str, Any], **sections: Any) -> OutriderConfig:
    return parse_config({"target": {"model": "t"}, "drafter": drafter, **sections})


def co_located(method: str, **keys: Any) -> dict[str, Any]:
    return {"placement": "co_located", "method": method, **keys}


def literals_of_vllm() -> dict[str, list[str]]:
    """Names of the module's Literal types and the strings in each; vLLM itself is not imported."""
    found = {}
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            strings = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            found[node.targets[0].id] = strings
    return found


def fields_of_vllm() -> set[str]:
    body = next(
        node.body
        for node in ast.parse(SOURCE.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"
    )
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def test_every_key_of_vllms_speculative_config_is_taken_or_refused_with_a_reason():
    """So that a new one cannot be dropped in silence."""
    ours = set(CoLocatedConfig.model_fields) - {"placement"}
    elsewhere = {"num_speculative_tokens"}  # speculation's
    assert ours | set(REFUSED_KEYS) | elsewhere == fields_of_vllm()
    assert not ours & set(REFUSED_KEYS)


def test_every_method_of_vllms_is_placed_or_refused_with_a_reason():
    names = literals_of_vllm()
    known = {*names["SpeculativeMethod"], *names["NgramGPUTypes"], "mtp"}
    known |= {*names["DFlashModelTypes"], *names["DSparkModelTypes"], *names["EagleModelTypes"]}
    assert known == set(CO_LOCATED_METHODS) | set(REFUSED_METHODS)
    assert set(REMOTE_METHODS) <= set(CO_LOCATED_METHODS)
    aliases = set(names["MTPModelTypes"]) - {"mtp"}
    assert aliases == {name for name in aliases if name.endswith(MTP_ALIAS)}
    assert "deepseek_mtp" in aliases


@pytest.mark.parametrize("method", [*REFUSED_METHODS, "deepseek_mtp"])
@pytest.mark.parametrize("placement", ["with_target", "co_located"])
def test_refused_methods_say_why(method, placement):
    with pytest.raises(ConfigError) as caught:
        parsed({"placement": placement, "method": method})
    assert f"drafter.method: {REFUSED_METHODS.get(method, 'vLLM has replaced this name; write method: mtp')}" in str(
        caught.value
    )


@pytest.mark.parametrize("method", [name for name in CO_LOCATED_METHODS if name not in REMOTE_METHODS])
def test_what_needs_hidden_states_does_not_run_in_a_drafter_actor(method):
    with pytest.raises(ConfigError, match=r"drafter\.method: .*placement: co_located"):
        parsed({"method": method, "model": "m"})


@pytest.mark.parametrize("method", CO_LOCATED_METHODS)
def test_co_located_keys_reach_vllm_as_they_are(method):
    model = {} if method in ("ngram", "suffix", "mtp", "dspark", "ngram_gpu") else {"model": "m"}
    config = parsed(co_located(method, **model, num_speculative_tokens=3, max_model_len=512))
    assert config.co_located is not None
    assert config.remote_drafter is None
    expected = {"method": method, **model, "max_model_len": 512, "num_speculative_tokens": 3}
    assert config.co_located.speculative_config(config.num_speculative_tokens) == expected


def test_what_is_not_written_is_left_to_vllm():
    config = parsed(co_located("eagle3", model="m", disable_padded_drafter_batch=False))
    assert config.co_located.speculative_config(4) == {
        "method": "eagle3",
        "model": "m",
        "disable_padded_drafter_batch": False,
        "num_speculative_tokens": 4,
    }


def test_a_co_located_drafter_has_no_pipeline():
    with pytest.raises(ConfigError, match=r"target.pipeline_parallel_size \(2\) must be 1.*co_located"):
        parse_config({"target": {"model": "t", "pipeline_parallel_size": 2}, "drafter": co_located("ngram")})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            {"method": "draft_model", "model": "m", "placement": "beside"},
            "drafter.placement: must be 'with_target'.*'beside'",
        ),
        ({"placement": "co_located"}, "drafter.method: required"),
        ({"method": "medusae"}, "drafter.method: unknown; a drafter actor takes draft_model, ngram, suffix"),
        ({"method": 7}, "drafter.method: must be a name.*found 7"),
        (co_located("medusae"), "drafter.method: unknown.*eagle3, mtp, medusa, dflash"),
        (co_located("eagle3"), "drafter.model: required, but missing"),
        (co_located("ngram", model="m"), "drafter.model: method ngram has no model"),
        (co_located("eagle", model="m", prompt_lookup_max=3), "drafter.prompt_lookup_max: only for method ngram"),
        (co_located("ngram", prompt_lookup_min=4, prompt_lookup_max=2), "drafter: prompt_lookup_min"),
        (co_located("mtp", tensor_parallel_size=2), "drafter.tensor_parallel_size: write draft_tensor_parallel_size"),
        (co_located("mtp", draft_tensor_parallel_size=2), r"drafter.draft_tensor_parallel_size \(2\) must be 1 or"),
        (
            co_located("mtp", rejection_sample_method="synthetic"),
            "drafter.rejection_sample_method: synthetic acceptance",
        ),
        (co_located("mtp", synthetic_acceptance_length=2.0), "drafter.synthetic_acceptance_length: .*distribution"),
        (co_located("mtp", max_modellen=2), "drafter.max_modellen: unknown key"),
        (co_located("mtp", max_num_seqs=2), "drafter.max_num_seqs: unknown key"),
        ({"method": "draft_model", "model": "m", "parallel_drafting": True}, "drafter.parallel_drafting: .*co_located"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "drafter.suffix_decoding_min_token_prob.*1.5"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "drafter.prompt_lookup_max: unknown key"),
        ({"method": "suffix", "cores": [[0], [1]]}, "a drafter of method suffix is one process"),
    ],
)
def test_wrong_fields_are_named(drafter, message):
    with pytest.raises(ConfigError, match=message):
        parsed(drafter)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("speculation", "verification", "coupled"),
        ("speculation", "verification", "block"),
        ("speculation", "adaptive", False),
        ("speculation", "draft_top_n", 0),
        ("speculation", "draft_ahead", False),
        ("link", "round_deadline_ms", 5.0),
        ("link", "backend", "gloo"),
    ],
)
def test_settings_of_our_rounds_are_refused_where_vllm_drafts(section, key, value):
    with pytest.raises(ConfigError, match=rf"{section}\.{key} \({value}\) .* no effect"):
        parsed(co_located("ngram"), **{section: {key: value}})


def test_a_key_of_vllms_in_the_wrong_section_is_sent_to_the_right_one():
    with pytest.raises(ConfigError, match=r"speculation\.placement: .*drafter section"):
        parsed({"method": "ngram"}, speculation={"placement": "co_located"})
    with pytest.raises(ConfigError, match=r"speculation\.prompt_lookup_max: .*drafter section"):
        parsed({"method": "ngram"}, speculation={"prompt_lookup_max": 3})


@pytest.mark.parametrize("drafter", [{"method": "ngram"}, co_located("ngram")])
def test_k_may_stand_where_vllm_has_it(drafter):
    config = parsed({**drafter, "num_speculative_tokens": 7})
    assert config.num_speculative_tokens == 7
    same = parsed({**drafter, "num_speculative_tokens": 7}, speculation={"num_speculative_tokens": 7})
    assert same == config
    with pytest.raises(ConfigError, match="is 7 in the drafter section and 5 in speculation"):
        parsed({**drafter, "num_speculative_tokens": 7}, speculation={"num_speculative_tokens": 5})
    with pytest.raises(ConfigError, match=r"speculation\.num_speculative_tokens: must be 1 to 32"):
        parsed({**drafter, "num_speculative_tokens": 0})


def test_draft_tensor_parallel_size_is_a_name_for_the_drafters_ranks():
    drafter = {"method": "draft_model", "model": "m"}
    assert parsed({**drafter, "draft_tensor_parallel_size": 2}).drafter.tensor_parallel_size == 2
    assert parsed({**drafter, "draft_tensor_parallel_size": None}).drafter.tensor_parallel_size == 1
    both = {"draft_tensor_parallel_size": 2, "tensor_parallel_size": 2}
    assert parsed({**drafter, **both}).drafter.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match=r"draft_tensor_parallel_size \(2\) and tensor_parallel_size \(4\).*disagree"):
        parsed({**drafter, "draft_tensor_parallel_size": 2, "tensor_parallel_size": 4})


@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "suffix", "suffix_decoding_max_tree_depth": 12},
        {"method": "draft_model", "model": "m", "draft_tensor_parallel_size": 2, "quantization": "fp8"},
        co_located("eagle3", model="m", num_speculative_tokens=5, draft_load_config={"load_format": "dummy"}),
        co_located("ngram", num_speculative_tokens_per_batch_size=[[1, 8, 4], [9, 64, 1]]),
    ],
)
def test_a_parsed_configuration_survives_a_round_trip(drafter):
    config = parsed(drafter)
    assert parse_config(config.model_dump()) == config
    assert parse_config(config.model_dump(mode="json")) == config


def test_files_from_before_there_was_a_choice_of_place_are_remote():
    assert isinstance(parsed({"method": "draft_model", "model": "m"}).remote_drafter, DraftModelConfig)
    assert isinstance(parsed({"method": "suffix"}).remote_drafter, SuffixConfig)


def test_co_located_drafting_takes_no_cores_and_no_bundle_of_its_own():
    config = parsed(co_located("eagle", model="m"))
    plan = plan_cores(config, [0, 1])
    assert (plan.target, plan.drafter) == (((0, 1),), ())
    placement = placement_of(config, plan)
    assert placement.bundles == ({"CPU": 3.0},)
    assert placement_of(config, None).bundles == ({"GPU": 1.0, "CPU": 2.0},)


def test_a_suffix_drafter_takes_the_last_core_and_no_gpu():
    config = parsed({"method": "suffix"})
    plan = plan_cores(config, [0, 1, 2])
    assert (plan.target, plan.drafter) == (((0, 1),), ((2,),))
    assert placement_of(config, None).bundles[-1] == {"CPU": 1.0}


@pytest.mark.parametrize("method", sorted(GPU_ONLY_METHODS))
def test_methods_without_cpu_kernels_are_refused_on_cpu(method):
    drafter = parsed(co_located(method)).co_located
    with pytest.raises(ConfigError, match=f"drafter.method: {method} does not run on CPU"):
        check_build_drafts(drafter, gpu=False)
    check_build_drafts(drafter, gpu=True)


def test_block_verification_is_refused_where_vllm_would_ignore_it():
    drafter = parsed(co_located("ngram", rejection_sample_method="block")).co_located
    with pytest.raises(ConfigError, match=r"drafter\.rejection_sample_method: block"):
        check_build_drafts(drafter, gpu=False)
    check_build_drafts(drafter, gpu=True)


@pytest.mark.parametrize("there", [True, False])
def test_co_located_suffix_is_refused_without_its_package(monkeypatch, there):
    monkeypatch.setattr("outrider.cluster.drafter_config.find_spec", lambda name: object() if there else None)
    drafter = parsed(co_located("suffix")).co_located
    if there:
        check_build_drafts(drafter, gpu=False)
        return
    with pytest.raises(ConfigError, match="arctic-inference"):
        check_build_drafts(drafter, gpu=True)


def test_where_a_drafter_actor_is() -> None:
    assert parsed({"method": "ngram"}).drafter.placement == "with_target"
    assert parsed({"method": "ngram", "placement": "remote"}).drafter.placement == "with_target", "its older name"
    pool = parsed({"method": "ngram", "placement": "pool", "num_drafters": 3}).drafter
    assert (pool.pooled, pool.num_drafters) == (True, 3)


@pytest.mark.parametrize("number", [0, -1, 1025, "many"])
def test_a_pool_has_a_number_of_drafters(number) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.num_drafters"):
        parsed({"method": "ngram", "placement": "pool", "num_drafters": number})


def test_each_target_has_one_drafter_of_its_own_outside_a_pool() -> None:
    with pytest.raises(ConfigError, match=r"num_drafters \(2\): only with placement: pool"):
        parsed({"method": "ngram", "num_drafters": 2})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"autoscaling": {"max": 2}}, "autoscaling: only with placement: pool"),
        ({"placement": "pool", "num_drafters": 2, "autoscaling": {"max": 2}}, "num_drafters: is given beside"),
        ({"placement": "pool", "autoscaling": {"min": 3, "max": 2}}, r"max: 2 is below min \(3\)"),
        ({"placement": "pool", "autoscaling": {}}, r"drafter\.autoscaling\.max"),
        ({"placement": "pool", "autoscaling": {"max": 2, "worth": -1}}, r"drafter\.autoscaling\.worth"),
    ],
)
def test_a_pool_that_follows_its_gain_is_checked(drafter, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed({"method": "ngram", **drafter})


def test_a_pool_s_limits() -> None:
    fixed = parsed({"method": "ngram", "placement": "pool", "num_drafters": 3}).drafter
    assert (fixed.least_drafters, fixed.most_drafters) == (3, 3)
    scaled = parsed({"method": "ngram", "placement": "pool", "autoscaling": {"max": 5}}).drafter
    assert (scaled.least_drafters, scaled.most_drafters) == (0, 5)
