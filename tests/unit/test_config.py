"""The configuration tree: what it accepts, and that what it refuses is named by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import MAX_SPECULATIVE_TOKENS, ConfigError, load_config, parse_config

DRAFT_MODEL = {"method": "draft_model", "model": "d"}


def tree(**sections: Any) -> dict[str, Any]:
    return {"target": {"model": "some/target"}, "drafter": dict(DRAFT_MODEL), **sections}


def test_defaults_are_complete() -> None:
    config = parse_config({"target": {"model": "org/Some-Model"}})
    assert config.drafter is None
    assert config.num_speculative_tokens == 0, "without a drafter there is nothing to draft"
    assert config.served_model_name == "Some-Model"
    assert config.serving.public == ("127.0.0.1", 8000, 9000)


def test_lengths_adapt_and_drafts_run_ahead_unless_switched_off() -> None:
    speculation = parse_config(tree()).speculation
    assert (speculation.adaptive, speculation.draft_ahead, speculation.max_side_branches) == (True, True, 12)
    off = {"adaptive": False, "draft_ahead": False, "max_side_branches": 0}
    speculation = parse_config(tree(speculation=off)).speculation
    assert speculation.model_dump(include=set(off)) == off


def test_served_name_of_a_path_ignores_a_trailing_slash() -> None:
    assert parse_config({"target": {"model": "/models/tiny/"}}).served_model_name == "tiny"


def test_drafter_is_told_apart_by_method() -> None:
    assert parse_config(tree()).drafter.method == "draft_model"
    ngram = parse_config(tree(drafter={"method": "ngram"})).drafter
    assert (ngram.method, ngram.tensor_parallel_size) == ("ngram", 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "target: required"),
        ({"target": {}}, "target.model: required"),
        ({"target": {"model": ""}}, "target.model"),
        (tree(target={"model": "t", "max_modellen": 5}), "target.max_modellen: unknown key"),
        (tree(speculator={}), "speculator: unknown key"),
        (tree(drafter={"method": "ngram", "model": "d"}), "drafter.model: unknown key"),
        (
            tree(drafter={"method": "eagle"}),
            "drafter.method: eagle needs the target's hidden states.*placement: co_located",
        ),
        (tree(drafter={"method": "draft_model"}), "drafter.model: required"),
        (tree(speculation={"num_speculative_tokens": 0}), "speculation.num_speculative_tokens.*found 0"),
        (
            tree(speculation={"num_speculative_tokens": MAX_SPECULATIVE_TOKENS + 1}),
            "speculation.num_speculative_tokens.*found 33",
        ),
        (tree(target={"model": "t", "tensor_parallel_size": 0}), "target.tensor_parallel_size.*found 0"),
        (tree(target={"model": "t", "pipeline_parallel_size": 0}), "target.pipeline_parallel_size.*found 0"),
        (
            tree(target={"model": "t", "pipeline_parallel_size": 2, "async_scheduling": True}),
            r"target.async_scheduling: true does not go with pipeline_parallel_size \(2\).*leave it out",
        ),
        (
            tree(target={"model": "t", "pipeline_parallel_size": 2, "tensor_parallel_size": 2, "cores": [[0], [1]]}),
            "target: cores lists 2 sets for 4 ranks",
        ),
        (
            tree(drafter={"method": "draft_model", "model": "d", "pipeline_parallel_size": 2}),
            "drafter.pipeline_parallel_size: .*set drafter.tensor_parallel_size",
        ),
        (
            tree(target={"model": "t", "engine_args": {"pipeline_parallel_size": 2}}),
            "target.engine_args.pipeline_parallel_size: .*write it as target.pipeline_parallel_size",
        ),
        (tree(target={"model": "t", "dtype": "float64"}), "target.dtype.*float32"),
        (tree(target={"model": "t", "gpu_memory_utilization": float("nan")}), "target.gpu_memory_utilization"),
        (tree(target={"model": "t", "cores": [[0], [1]]}), "target: cores lists 2 sets for 1 ranks"),
        (tree(target={"model": "t", "cores": [[]]}), "target.cores"),
        (tree(target={"model": "t", "cores": [[-1]]}), "target.cores"),
        (tree(drafter={"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}), "prompt_lookup_min"),
        (tree(link={"round_deadline_ms": 500, "link_deadline_ms": 500}), "link_deadline_ms.*round_deadline_ms"),
        (tree(link={"round_deadline_ms": float("inf")}), "link.round_deadline_ms"),
        (tree(serving={"grpc_port": 65536}), "serving.grpc_port.*found 65536"),
        (tree(serving={"app_name": "a b"}), "serving.app_name"),
        (tree(speculation={"draft_top_n": 129}), "speculation.draft_top_n.*found 129"),
        (tree(speculation={"verification": "greedy"}), "speculation.verification.*'rejection', 'block' or 'coupled'"),
        (tree(speculation={"max_side_branches": -1}), "speculation.max_side_branches.*found -1"),
        (tree(speculation={"max_side_branches": 65}), "speculation.max_side_branches.*found 65"),
        (tree(speculation={"adaptive": "often"}), "speculation.adaptive.*found 'often'"),
        (tree(serving={"autoscaling": {}}), "serving.autoscaling.max: required"),
        (tree(serving={"autoscaling": {"min": 0, "max": 2}}), r"serving.autoscaling.min: 0 replicas.*write 1 or more"),
        (tree(serving={"autoscaling": {"min": 3, "max": 2}}), r"serving.autoscaling.max: 2 is below min \(3\)"),
        (tree(serving={"autoscaling": {"max": 2, "target_queue_s": 0}}), "target_queue_s.*found 0"),
        (tree(serving={"autoscaling": {"max": 2, "target_kv_usage": 1.5}}), "target_kv_usage.*found 1.5"),
        (tree(serving={"autoscaling": {"max": 2, "downscale_delay_s": -1}}), "downscale_delay_s.*found -1"),
        (tree(serving={"autoscaling": {"max": 2, "target_ongoing_requests": 2}}), "target_ongoing_requests: unknown"),
        (
            tree(serving={"num_replicas": 2, "autoscaling": {"max": 4}}),
            r"serving.num_replicas: is given beside autoscaling.*write autoscaling.min",
        ),
        ([], "expected a mapping"),
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


def test_errors_are_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(target={"model": "t", "dtype": "int8", "seed": "x"}, drafter={"method": "ngram", "a": 1}))
    assert "\n" not in str(caught.value)


def test_load_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=r"c\.yaml: no such file"):
        load_config(file)
    file.write_text("target: [")
    with pytest.raises(ConfigError, match=r"c\.yaml: not readable as YAML"):
        load_config(file)
    file.write_text("target: {model: m, revision: 2026-13-45}")
    with pytest.raises(ConfigError, match=r"c\.yaml: not readable as YAML: month must be in"):
        load_config(file)
    file.write_text("target:\n  model: a\n  seed: 1\n  model: b\n")
    with pytest.raises(
        ConfigError, match=r"c\.yaml: not readable as YAML: 'model' stands twice; keep one of them"
    ) as twice:
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
    for sections in ({"link": {"round_deadline_ms": 50}}, {"serving": {"autoscaling": {"max": 2}}}):
        config = parse_config(tree(**sections))
        assert parse_config(config.model_dump()) == config
        assert parse_config(config.model_dump(mode="json", exclude_unset=True)) == config


def test_replicas_are_a_number_or_follow_the_load() -> None:
    serving = parse_config(tree(serving={"num_replicas": 3})).serving
    assert (serving.least_replicas, serving.most_replicas) == (3, 3)
    serving = parse_config(tree(serving={"autoscaling": {"min": 2, "max": 4}})).serving
    assert (serving.least_replicas, serving.most_replicas) == (2, 4)


@pytest.mark.parametrize("k", [0, -1, 33])
def test_a_k_out_of_range_says_how_to_serve_without_speculation(k: int) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.num_speculative_tokens: must be 1 to 32; .*leave the drafter"):
        parse_config({"target": {"model": "m"}, "speculation": {"num_speculative_tokens": k}})


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"method": "ngram"}, "method ngram has none; use auto"),
        ({"method": "suffix"}, "method suffix has none"),
        ({"method": "draft_model", "model": "d", "tensor_parallel_size": 2}, r"drafter\.tensor_parallel_size above 1"),
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_is_refused_where_the_drafter_has_no_device_of_its_own(drafter, message, backend):
    data = {"target": {"model": "t"}, "drafter": drafter}
    with pytest.raises(ConfigError, match=rf"^config: link\.backend: {backend} needs a device .*{message}"):
        parse_config({**data, "link": {"backend": backend}})
    for other in ("auto", "local", "gloo"):
        assert parse_config({**data, "link": {"backend": other}}).link.backend == other


@pytest.mark.parametrize("backend", ["nccl", "hccl", "xccl"])
def test_a_device_s_wire_between_two_devices_is_taken(backend):
    one = {"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": "d"}, "link": {"backend": backend}}
    assert parse_config(one).link.backend == backend


def test_a_wire_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"link\.backend: .*'gloo', 'nccl', 'hccl' or 'xccl'"):
        parse_config({"target": {"model": "t"}, "link": {"backend": "mpi"}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"serving": {"node_types": [{"cpus": 4}]}}, r"serving\.node_types: .* set nodes_may_come"),
        ({"serving": {"nodes_may_come": True, "node_types": [{"gpus": 4}]}}, r"node_types\.0\.cpus: required"),
        ({"target": {"model": "t", "node_labels": {"zone": "!a"}}}, r"target\.node_labels\.zone: .*\(found '!a'\)"),
        ({"target": {"model": "t", "node_labels": {"a b": "c"}}}, r"target\.node_labels\.a b"),
        ({"drafter": {"method": "ngram", "node_labels": {"zone": "in(a,b)"}}}, r"drafter\.node_labels\.zone"),
    ],
)
def test_nodes_are_named_by_kinds_and_plain_labels(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"target": {"model": "t"}, **sections})
    good = {"ray.io/accelerator-type": "H100", "zone": "eu-west_1.a"}
    assert parse_config({"target": {"model": "t", "node_labels": good}}).target.node_labels == good
