"""Bundles of a replica, and of a drafter of a pool."""

from __future__ import annotations

import pytest

from outrider.cluster.config import OutriderConfig, parse_config
from outrider.cluster.placement import float32_environment, placement_of, plan_cores, pool_placement_of


def config(target_ranks: int = 1, drafter_ranks: int | None = 1, method: str = "draft_model") -> OutriderConfig:
    data: dict[str, object] = {"target": {"model": "t", "tensor_parallel_size": target_ranks}}
    if method == "ngram":
        data["drafter"] = {"method": "ngram"}
    elif drafter_ranks is not None:
        data["drafter"] = {"method": "draft_model", "model": "d", "tensor_parallel_size": drafter_ranks}
    return parse_config(data)


def test_ranks_of_a_model_share_a_bundle_which_ray_never_splits_over_nodes() -> None:
    placement = placement_of(config(4, 2), None)
    assert placement.bundles == ({"GPU": 4.0, "CPU": 5.0}, {"GPU": 2.0, "CPU": 2.0})
    assert placement.target_bundle_indices == (0, 0, 0, 0), "with the replica itself, whose node Serve looks at"
    assert placement.drafter_bundle_indices == (1, 1)
    assert placement.strategy == "PACK", "the drafter on the same node where there is room"


def test_an_ngram_drafter_takes_no_gpu() -> None:
    placement = placement_of(config(method="ngram"), None)
    assert placement.total("GPU") == 1
    assert placement.bundles[placement.drafter_bundle_indices[0]] == {"CPU": 1.0}


def test_ranks_that_share_cores_count_for_what_they_share() -> None:
    served = config(3, 2)
    placement = placement_of(served, plan_cores(served, range(2)))
    assert placement.bundles == ({"CPU": 4.0}, {"CPU": 2.0})
    assert set(placement.target_bundle_indices) | set(placement.drafter_bundle_indices) == {0, 1}


def pooled(ranks: int = 2, num_drafters: int = 2) -> OutriderConfig:
    drafter = {"method": "draft_model", "model": "d", "tensor_parallel_size": ranks}
    return parse_config(
        {"target": {"model": "t"}, "drafter": {**drafter, "placement": "pool", "num_drafters": num_drafters}}
    )


def test_a_pool_s_drafter_has_a_group_of_its_own() -> None:
    config = pooled()
    target, pool = placement_of(config, None), pool_placement_of(config, None)
    assert target.bundles == ({"GPU": 1.0, "CPU": 2.0},)
    assert target.drafter_bundle_indices == ()
    assert pool is not None
    assert pool.bundles == ({"CPU": 1.0}, {"GPU": 2.0, "CPU": 2.0})
    assert (pool.drafter_bundle_indices, pool.strategy) == ((1, 1), "STRICT_PACK")
    assert pool_placement_of(parse_config({"target": {"model": "t"}}), None) is None


def test_float32_is_that_of_ieee_unless_the_operator_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    assert float32_environment("bfloat16", "float32") == {"TRITON_F32_DEFAULT": "ieee"}
    assert float32_environment("auto", "float16") == float32_environment() == {}
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert float32_environment("float32") == {"TRITON_F32_DEFAULT": "tf32x3"}
