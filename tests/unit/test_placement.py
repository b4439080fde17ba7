"""Bundles of a replica, and that a cluster too small for them is refused instead of waited for."""

from __future__ import annotations

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.placement import check_cluster_can_hold, placement_of, plan_cores, pool_placement_of


def config(target_ranks: int = 1, drafter_ranks: int | None = 1, method: str = "draft_model") -> OutriderConfig:
    data: dict[str, object] = {"target": {"model": "t", "tensor_parallel_size": target_ranks}}
    if method == "ngram":
        data["drafter"] = {"method": "ngram"}
    elif drafter_ranks is not None:
        data["drafter"] = {"method": "draft_model", "model": "d", "tensor_parallel_size": drafter_ranks}
    return parse_config(data)


def test_ranks_of_a_model_share_a_bundle_which_ray_never_splits_over_nodes() -> None:
    placement = placement_of(config(4, 2), on_gpu=True)
    assert placement.bundles == ({"CPU": 1.0}, {"GPU": 4.0, "CPU": 4.0}, {"GPU": 2.0, "CPU": 2.0})
    assert placement.target_bundle_indices == (1, 1, 1, 1)
    assert placement.drafter_bundle_indices == (2, 2)
    assert placement.strategy == "PACK", "target and drafter may sit on different nodes"


def test_so_do_the_ranks_of_all_pipeline_stages() -> None:
    target = {"model": "t", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = parse_config({"target": target, "drafter": {"method": "ngram"}})
    placement = placement_of(config, on_gpu=True)
    assert placement.bundles[1] == {"GPU": 4.0, "CPU": 4.0}
    assert placement.target_bundle_indices == (1, 1, 1, 1)
    plan = plan_cores(config, range(9))
    assert (plan.target, plan.drafter) == (((0, 1), (2, 3), (4, 5), (6, 7)), ((8,),))
    with pytest.raises(ConfigError, match=r"4 target ranks on one node.*lower it or target\.pipeline_parallel_size"):
        check_cluster_can_hold(placement, 1, [{"GPU": 2.0, "CPU": 9.0}] * 2)


def test_an_ngram_drafter_takes_no_gpu() -> None:
    placement = placement_of(config(method="ngram"), on_gpu=True)
    assert placement.total("GPU") == 1
    assert placement.bundles[placement.drafter_bundle_indices[0]] == {"CPU": 1.0}


def test_cpu_bundles_count_the_planned_cores() -> None:
    served = config(1, 2)
    placement = placement_of(served, on_gpu=False, core_plan=plan_cores(served, range(7)))
    assert placement.bundles == ({"CPU": 1.0}, {"CPU": 3.0}, {"CPU": 4.0})
    assert (placement.target_bundle_indices, placement.drafter_bundle_indices) == ((1,), (2, 2))


def test_without_a_drafter_there_is_no_drafter_bundle() -> None:
    placement = placement_of(config(drafter_ranks=None), on_gpu=True)
    assert placement.drafter_bundle_indices == ()
    assert len(placement.bundles) == 2


def test_ranks_that_share_cores_count_for_what_they_share() -> None:
    served = config(3, 2)
    placement = placement_of(served, on_gpu=False, core_plan=plan_cores(served, range(2)))
    assert placement.bundles == ({"CPU": 1.0}, {"CPU": 3.0}, {"CPU": 2.0})
    assert set(placement.target_bundle_indices) | set(placement.drafter_bundle_indices) == {1, 2}


def test_a_cpu_placement_needs_a_plan_of_its_own_configuration() -> None:
    with pytest.raises(ValueError, match="core plan"):
        placement_of(config(), on_gpu=False)
    with pytest.raises(AssertionError, match="another configuration"):
        placement_of(config(2, 1), on_gpu=False, core_plan=plan_cores(config(1, 1), range(4)))


def test_a_cluster_that_fits_exactly_is_fine() -> None:
    check_cluster_can_hold(placement_of(config(2, 1), on_gpu=True), 1, [{"GPU": 3.0, "CPU": 4.0}])
    check_cluster_can_hold(
        placement_of(config(2, 1), on_gpu=True), 1, [{"GPU": 2.0, "CPU": 2.0}, {"GPU": 1.0, "CPU": 2.0}]
    )


@pytest.mark.parametrize(
    ("replicas", "resources", "message"),
    [
        (
            1,
            {"GPU": 2.0, "CPU": 64.0},
            r"target\.tensor_parallel_size: 1 replica of 2 target and 1 drafter.*3 GPUs.*has 2",
        ),
        (1, {"CPU": 64.0}, r"3 GPUs, the cluster has 0"),
        (2, {"GPU": 3.0, "CPU": 64.0}, r"serving\.num_replicas: 2 replicas.*6 GPUs, the cluster has 3"),
        (1, {"GPU": 8.0, "CPU": 3.0}, r"4 logical CPUs, the cluster has 3"),
    ],
)
def test_what_a_cluster_lacks_is_named(replicas: int, resources: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster_can_hold(placement_of(config(2, 1), on_gpu=True), replicas, [resources])


@pytest.mark.parametrize(
    ("ranks", "nodes", "message"),
    [
        (
            (4, 1),
            [{"GPU": 3.0, "CPU": 9.0}, {"GPU": 3.0, "CPU": 9.0}],
            r"target\.tensor_parallel_size: 4 target ranks.*4 GPUs",
        ),
        ((1, 2), [{"GPU": 1.0, "CPU": 9.0}] * 3, r"drafter\.tensor_parallel_size: 2 drafter ranks on one node"),
        ((2, 1), [{"GPU": 4.0, "CPU": 1.0}, {"CPU": 64.0}], r"2 GPUs and 2 CPUs there, which no node"),
    ],
)
def test_ranks_that_no_node_holds_together_are_refused(ranks, nodes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster_can_hold(placement_of(config(*ranks), on_gpu=True), 1, nodes)


def pooled(ranks: int = 2, num_drafters: int = 2) -> OutriderConfig:
    drafter = {"method": "draft_model", "model": "d", "tensor_parallel_size": ranks}
    return parse_config(
        {"target": {"model": "t"}, "drafter": {**drafter, "placement": "pool", "num_drafters": num_drafters}}
    )


def test_a_pool_s_drafter_has_a_group_of_its_own() -> None:
    config = pooled()
    target, pool = placement_of(config, on_gpu=True), pool_placement_of(config, on_gpu=True)
    assert target.bundles == ({"CPU": 1.0}, {"GPU": 1.0, "CPU": 1.0})
    assert target.drafter_bundle_indices == ()
    assert pool is not None
    assert pool.bundles == ({"CPU": 1.0}, {"GPU": 2.0, "CPU": 2.0})
    assert (pool.drafter_bundle_indices, pool.strategy) == ((1, 1), "STRICT_PACK")
    assert pool_placement_of(parse_config({"target": {"model": "t"}}), on_gpu=True) is None


def test_a_pool_counts_where_the_cluster_is_looked_at() -> None:
    config = pooled()
    target, pool = placement_of(config, on_gpu=True), pool_placement_of(config, on_gpu=True)
    check_cluster_can_hold(target, 3, [{"GPU": 3.0, "CPU": 99.0}, {"GPU": 4.0, "CPU": 99.0}], pool, 2)
    with pytest.raises(ConfigError, match=r"and a pool of 2 need 7 GPUs, the cluster has 6"):
        check_cluster_can_hold(target, 3, [{"GPU": 3.0, "CPU": 99.0}] * 2, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node need 3 CPUs"):
        check_cluster_can_hold(target, 3, [{"GPU": 2.0, "CPU": 2.0}] * 7, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node"):
        check_cluster_can_hold(target, 3, [{"GPU": 1.0, "CPU": 99.0}] * 7, pool, 2)
