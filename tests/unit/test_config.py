"""The configuration tree: what it accepts, and that what it refuses is named by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import MAX_SPECULATIVE_TOKENS, ConfigError, load_config, parse_config
from outrider.cluster.engine_args import REFUSED, Side, about

DRAFT_MODEL = {"method": "draft_model", "model": "d"}
NEAR, FAR = {"name": "near", "path": "/a/near"}, {"name": "far", "path": "/a/far"}


def co_located(method: str, **keys: Any) -> dict[str, Any]:
    return {"placement": "co_located", "method": method, **keys}


def tree(**sections: Any) -> dict[str, Any]:
    return {"target": {"model": "some/target"}, "drafter": dict(DRAFT_MODEL), **sections}


def test_defaults_are_complete() -> None:
    config = parse_config({"target": {"model": "org/Some-Model"}})
    assert config.drafter is None
    assert config.num_speculative_tokens == 0, "without a drafter there is nothing to draft"
    assert config.served_model_name == "Some-Model"
    assert parse_config({"target": {"model": "/models/tiny/"}}).served_model_name == "tiny"
    assert config.serving.public == ("127.0.0.1", 8000, 9000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "target: required"),
        ({"target": {}}, "target.model: required"),
        ({"target": {"model": ""}}, "target.model"),
        (tree(target={"model": "t", "max_modellen": 5}), "target.max_modellen: unknown key"),
        (tree(speculator={}), "speculator: unknown key"),
        (tree(target={"model": "t", "quantization": "fp8"}), "target.quantization: .*belongs into target.engine_args"),
        (tree(drafter={"method": "ngram", "model": "d"}), "drafter.model: unknown key"),
        (tree(drafter={"method": "eagle"}), "drafter.method: a drafter actor takes.*placement: co_located"),
        (tree(drafter={"method": 7}), "drafter.method: .*found 7"),
        (
            tree(drafter=co_located("mlp_speculator", model="m")),
            "drafter.placement: .*ranks alone; leave it out",
        ),
        (tree(drafter={"method": "mlp_speculator"}), "drafter.model: required"),
        (tree(drafter={"placement": "co_located"}), "drafter.method: required"),
        (tree(drafter={**DRAFT_MODEL, "placement": "beside"}), "drafter.placement: must be 'with_target'.*'beside'"),
        (tree(drafter={"method": "suffix", "cores": [[0], [1]]}), "drafter.cores"),
        (tree(drafter={"method": "ngram", "num_drafters": 2}), r"num_drafters \(2\): only with placement: pool"),
        (tree(drafter={"method": "ngram", "autoscaling": {"max": 2}}), "autoscaling: only with placement: pool"),
        (
            tree(drafter={**DRAFT_MODEL, "learn": {}, "engine_args": {"quantization": "fp8"}}),
            "drafter.learn: weights quantised as fp8",
        ),
        (
            tree(
                target={"model": "t", "lora_modules": [NEAR]},
                drafter={**DRAFT_MODEL, "learn": {}, "lora_modules": [NEAR]},
            ),
            "drafter.learn: a drafter with lora_modules is not trained",
        ),
        (tree(drafter={**DRAFT_MODEL, "lora_modules": [NEAR]}), "drafter.lora_modules: 'near' is none of target"),
        (tree(target={"model": "near", "lora_modules": [NEAR]}), "target.lora_modules: 'near' is the model itself"),
        (tree(target={"model": "t", "lora_modules": [{"name": "a b", "path": "p"}]}), "target.lora_modules.0.name"),
        (
            tree(drafter=co_located("mtp", rejection_sample_method="synthetic")),
            "drafter.rejection_sample_method: synthetic acceptance",
        ),
        (
            tree(
                target={"model": "t", "engine_args": {"decode_context_parallel_size": 2}},
                drafter=DRAFT_MODEL,
                speculation={"num_paths": 2},
            ),
            "target.engine_args.decode_context_parallel_size: cannot be used with speculation.num_paths",
        ),
        (tree(drafter=co_located("custom_class", model="m.C")), "drafter.method: custom_class is how Outrider itself"),
        (
            tree(drafter=co_located("ngram"), target={"model": "t", "pipeline_parallel_size": 2}),
            "target.pipeline_parallel_size has never been run beside a co-located drafter",
        ),
        (
            tree(drafter=co_located("ngram"), target={"model": "t", "lora_modules": [NEAR]}),
            "target.lora_modules has never been run beside",
        ),
        (tree(openai={"host": "0.0.0.0"}), "openai.host: has no effect here; set serving.gateway.host"),
        (
            tree(serving={"default_timeout_s": 9, "greatest_timeout_s": 3}),
            r"serving.default_timeout_s: 9 is above greatest_timeout_s \(3\)",
        ),
        (tree(drafter={"method": "draft_model"}), "drafter.model: required"),
        (
            tree(speculation={"num_speculative_tokens": MAX_SPECULATIVE_TOKENS + 1}),
            "speculation.num_speculative_tokens.*found 33",
        ),
        (tree(target={"model": "t", "tensor_parallel_size": 0}), "target.tensor_parallel_size.*found 0"),
        (
            tree(target={"model": "t", "pipeline_parallel_size": 2, "async_scheduling": True}),
            r"target.async_scheduling: true does not go with pipeline_parallel_size \(2\).*leave it out",
        ),
        (
            tree(target={"model": "t", "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "cores": [[0], [1]]}),
            "target: cores lists 2 sets for 4 ranks",
        ),
        (
            tree(target={"model": "t", "engine_args": {"pipeline_parallel_size": 2}}),
            "target.engine_args.pipeline_parallel_size: .*write it as target.pipeline_parallel_size",
        ),
        (tree(target={"model": "t", "dtype": "float64"}), "target.dtype.*float32"),
        (tree(target={"model": "t", "cores": [[0], [1]]}), "target: cores lists 2 sets for 1 ranks"),
        (tree(drafter={"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}), "prompt_lookup_min"),
        (tree(link={"round_deadline_ms": 500, "link_deadline_ms": 500}), "link_deadline_ms.*round_deadline_ms"),
        (tree(link={"backend": "mpi"}), r"link\.backend: .*'nccl', 'hccl' or 'xccl'"),
        (tree(serving={"grpc_port": 65536}), "serving.grpc_port.*found 65536"),
        (tree(serving={"app_name": "a b"}), "serving.app_name"),
        (tree(speculation={"verification": "greedy"}), "speculation.verification.*'rejection', 'block' or 'coupled'"),
        (tree(speculation={"adaptive": "often"}), "speculation.adaptive.*found 'often'"),
        (tree(serving={"autoscaling": {}}), "serving.autoscaling.max: required"),
        (tree(serving={"autoscaling": {"min": 3, "max": 2}}), r"serving.autoscaling.max: 2 is below min \(3\)"),
        (
            tree(serving={"num_replicas": 2, "autoscaling": {"max": 4}}),
            "serving.num_replicas: is given beside autoscaling",
        ),
        (None, "expected a mapping"),
    ],
)
def test_wrong_fields_are_named(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(data)


@pytest.mark.parametrize(
    ("target", "ranks", "verifier", "ahead"),
    [
        ({}, 1, 0, True),
        ({"tensor_parallel_size": 4}, 4, 0, True),
        ({"async_scheduling": False}, 1, 0, False),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6, 4, False),
        ({"pipeline_parallel_size": 2, "async_scheduling": False}, 2, 1, False),
    ],
)
def test_the_verifier_is_the_first_rank_of_the_last_stage(
    target: dict[str, Any], ranks: int, verifier: int, ahead: bool
) -> None:
    section = parse_config({"target": {"model": "t", **target}}).target
    assert (section.num_ranks, section.verifier_rank, section.schedules_ahead) == (ranks, verifier, ahead)


def test_every_wrong_field_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(target={"model": "t", "max_num_seqs": 0}, link={"backend": "tcp"}))
    assert "target.max_num_seqs" in str(caught.value)
    assert "link.backend" in str(caught.value)


def test_load_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=r"c\.yaml: cannot be read: No such file"):
        load_config(file)
    file.write_text("target: [")
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML"):
        load_config(file)
    file.write_text("target: {model: 2026-13-45}")
    assert load_config(file).target.model == "2026-13-45"
    file.write_text("target:\n  model: a\n  max_num_seqs: 1\n  model: b\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML: the key 'model' occurs twice") as twice:
        load_config(file)
    assert "line 4, column 3" in str(twice.value)
    file.write_text("target: {model: m, extra: 1}")
    with pytest.raises(ConfigError, match=r"c\.yaml: target\.extra: unknown key"):
        load_config(file)
    file.write_text("target: {model: m}")
    assert load_config(file).target.model == "m"
    file.write_text("target: &a {model: m}\ndrafter: {<<: *a, method: draft_model, model: d}")
    assert load_config(file).drafter.model == "d", "what is merged may be said anew"


def test_a_parsed_configuration_survives_a_round_trip() -> None:
    for sections in (
        {"link": {"round_deadline_ms": 50}},
        {"serving": {"autoscaling": {"max": 2}}},
        {"openai": {"response_role": "helper"}},
        {"target": {"model": "t", "lora_modules": [NEAR, FAR]}, "drafter": {**DRAFT_MODEL, "lora_modules": [FAR]}},
        {"drafter": {**DRAFT_MODEL, "tensor_parallel_size": 2, "engine_args": {"quantization": "fp8"}}},
        {"drafter": co_located("eagle3", model="m", draft_load_config={"load_format": "dummy"})},
        {"drafter": co_located("ngram", num_speculative_tokens_per_batch_size=[[1, 8, 4], [9, 64, 1]])},
    ):
        config = parse_config(tree(**sections))
        assert parse_config(config.model_dump()) == config
        assert parse_config(config.model_dump(mode="json", exclude_unset=True)) == config


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"method": "ngram"}, "method ngram has none; use auto"),
        ({"method": "suffix"}, "method suffix has none"),
        (
            {"method": "draft_model", "model": "d", "tensor_parallel_size": 2},
            "tensor_parallel_size is above 1",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_is_refused_where_the_drafter_has_no_device_of_its_own(drafter, message, backend):
    data = {"target": {"model": "t"}, "drafter": drafter}
    with pytest.raises(ConfigError, match=rf"^config: link\.backend: {backend} needs a device .*{message}"):
        parse_config({**data, "link": {"backend": backend}})
    assert parse_config({**data, "link": {"backend": "auto"}}).link.backend == "auto"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"target": {"model": "t", "node_labels": {"zone": "!a"}}}, r"target\.node_labels\.zone: .*\(found '!a'\)"),
        ({"target": {"model": "t", "node_labels": {"a b": "c"}}}, r"target\.node_labels\.a b"),
        ({"drafter": {"method": "ngram", "node_labels": {"zone": "in(a,b)"}}}, r"drafter\.node_labels\.zone"),
    ],
)
def test_node_labels_are_plain(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"target": {"model": "t"}, **sections})
    good = {"ray.io/accelerator-type": "H100", "zone": "eu-west_1.a"}
    assert parse_config({"target": {"model": "t", "node_labels": good}}).target.node_labels == good


@pytest.mark.parametrize("side", REFUSED)
def test_engine_arguments_that_would_break_the_rounds_are_refused_by_name(side: Side) -> None:
    sections: dict[Side, dict[str, Any]] = {"target": {"model": "t"}, "drafter": dict(DRAFT_MODEL)}
    for name, instead in REFUSED[side].items():
        with pytest.raises(ConfigError) as caught:
            parse_config({**sections, side: {**sections[side], "engine_args": {name: "secret"}}})
        assert f"{side}.engine_args.{name}: is not passed on to vLLM: {instead}" in str(caught.value)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "limits", "takes"),
    [
        ({}, {"image": 0, "video": 0, "audio": 0}, False),
        ({"limit_mm_per_prompt": {"image": 2}}, {"image": 2, "video": 0, "audio": 0}, True),
        ({"limit_mm_per_prompt": {"image": 0}}, {"image": 0, "video": 0, "audio": 0}, False),
    ],
)
def test_pictures_are_taken_where_vllm_s_argument_says_so(arguments: Any, limits: Any, takes: bool) -> None:
    target = parse_config({"target": {"model": "t", "engine_args": arguments}}).target
    assert (target.media_limits, target.takes_pictures) == (limits, takes)


@pytest.mark.parametrize(
    ("error", "path"),
    [
        ("ValueError: Load format `flash` is not supported", "target.engine_args.load_format"),
        ("NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512", "drafter.engine_args.kv_cache_dtype"),
        ("1 validation error for CacheConfig block_size Input should be greater", "target.engine_args.block_size"),
        ("ValueError: no room for 12 KV blocks", None),
    ],
)
def test_an_engine_s_error_is_told_under_the_argument_that_it_is_about(error: str, path: str | None) -> None:
    given: dict[Side, dict[str, Any]] = {
        "target": {"load_format": "flash", "block_size": 0, "hf_overrides": {"a": 12}},
        "drafter": {"kv_cache_dtype": "fp8"},
    }
    assert about(error, given) == path


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "a method of tomorrow"])
def test_a_co_located_section_reaches_vllm_as_written(method: str) -> None:
    config = parse_config(
        tree(drafter=co_located(method, num_speculative_tokens=3, disable_padded_drafter_batch=False))
    )
    assert config.co_located is not None
    assert config.remote_drafter is None
    assert config.co_located.speculative_config(config.num_speculative_tokens) == {
        "method": method,
        "disable_padded_drafter_batch": False,
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("speculation", "verification", "coupled"), ("speculation", "adaptive", False), ("link", "backend", "nccl")],
)
def test_settings_of_our_rounds_are_refused_where_vllm_drafts(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: has no effect on drafter.placement: co_located"):
        parse_config(tree(drafter=co_located("ngram"), **{section: {key: value}}))


@pytest.mark.parametrize("drafter", [{"method": "ngram"}, co_located("ngram")])
def test_k_may_stand_where_vllm_has_it(drafter: dict[str, Any]) -> None:
    config = parse_config(tree(drafter={**drafter, "num_speculative_tokens": 7}))
    assert config.num_speculative_tokens == 7
    with pytest.raises(ConfigError, match=r"drafter\.num_speculative_tokens: 7 is not speculation's"):
        parse_config(tree(drafter={**drafter, "num_speculative_tokens": 7}, speculation={"num_speculative_tokens": 5}))


def test_drafters_and_replicas_have_a_number_or_follow_the_load() -> None:
    fixed = parse_config(tree(drafter={"method": "ngram", "placement": "pool", "num_drafters": 3})).remote_drafter
    scaled = parse_config(tree(drafter={"method": "ngram", "placement": "pool", "autoscaling": {"max": 5}}))
    assert fixed is not None
    assert scaled.remote_drafter is not None
    assert (fixed.most_drafters, scaled.remote_drafter.most_drafters) == (3, 5)
    for given, expected in (({"num_replicas": 3}, 3), ({"autoscaling": {"min": 2, "max": 4}}, 4)):
        assert parse_config(tree(serving=given)).serving.most_replicas == expected
