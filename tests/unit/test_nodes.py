"""What nodes hold: a cluster too small is refused instead of waited for, and a replica is kept on one node."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.nodes import Node, check_cluster_can_hold, check_nodes_hold_a_replica, kept_together
from outrider.cluster.placement import ReplicaPlacement, placement_of, pool_placement_of


def config(
    target_ranks: int = 2,
    drafter_ranks: int = 1,
    labels: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    **drafter: Any,
) -> OutriderConfig:
    target = {"model": "t", "tensor_parallel_size": target_ranks, "node_labels": labels[0]}
    own = {"method": "draft_model", "model": "d", "tensor_parallel_size": drafter_ranks, "node_labels": labels[1]}
    return parse_config({"target": target, "drafter": {**own, **drafter}})


def node(gpus: float, cpus: float = 99.0, **labels: str) -> Node:
    return Node({"GPU": gpus, "CPU": cpus} if gpus else {"CPU": cpus}, labels)


def placed(
    config: OutriderConfig, replicas: int, *nodes: Node, types: tuple[Node, ...] = (), may_come: bool = False
) -> tuple[ReplicaPlacement, str | None]:
    return kept_together(placement_of(config, on_gpu=True), replicas, nodes, types, nodes_may_come=may_come)


@pytest.mark.parametrize(
    ("nodes", "replicas", "strategy"),
    [
        ([node(3)], 1, "STRICT_PACK"),
        ([node(2), node(1)], 1, "PACK"),
        ([node(3, cpus=3), node(1)], 1, "PACK"),  # 2 + 1 of the target's, and 1 of the drafter's
        ([node(3, cpus=4), node(1)], 1, "STRICT_PACK"),
        ([node(3), node(2), node(1)], 2, "PACK"),
        ([node(6)], 2, "STRICT_PACK"),
    ],
)
def test_a_replica_is_kept_on_one_node_unless_none_holds_it(nodes: list[Node], replicas: int, strategy: str) -> None:
    placement, why_not = placed(config(), replicas, *nodes)
    assert placement.strategy == strategy
    assert (why_not is None) == (strategy == "STRICT_PACK")
    check_cluster_can_hold(placement, replicas, nodes)


def test_why_it_is_not_says_what_is_lacking() -> None:
    _, why_not = placed(config(), 2, node(3), node(2), node(1))
    assert why_not == (
        "2 target ranks and 1 drafter rank on one node need 3 GPUs and 4 CPUs there, "
        "of which the cluster's nodes hold 1"
    )


def test_where_nodes_may_come_their_kinds_decide_or_a_node_that_is_there() -> None:
    small, large = node(2), node(4)
    assert placed(config(), 1, node(0), may_come=True)[0].strategy == "PACK", "nothing is known"
    assert placed(config(), 2, node(3), may_come=True)[0].strategy == "STRICT_PACK", "more like it may come"
    assert placed(config(), 1, node(0), types=(small, large), may_come=True)[0].strategy == "STRICT_PACK"
    placement, why_not = placed(config(), 1, node(0), types=(small, node(1)), may_come=True)
    assert placement.strategy == "PACK"
    assert why_not is not None
    assert "serving.node_types hold none" in why_not


def test_what_is_alone_in_its_group_stays_together_whatever_there_is() -> None:
    alone = parse_config({"target": {"model": "t", "tensor_parallel_size": 4}})
    assert placed(alone, 1, node(1)) == (placement_of(alone, on_gpu=True), None)


def test_target_and_drafter_that_want_nodes_of_other_labels_are_apart() -> None:
    apart = config(labels=({"role": "target"}, {"role": "drafter"}))
    nodes = [node(8, role="target"), node(8, role="drafter")]
    placement, why_not = placed(apart, 1, *nodes)
    assert (placement.strategy, placement.labels) == ("PACK", ({"role": "target"}, {"role": "drafter"}))
    assert why_not == "target.node_labels and drafter.node_labels want another role each"
    check_cluster_can_hold(placement, 1, nodes)
    both = config(labels=({"zone": "a"}, {"disk": "fast"}))
    assert placed(both, 1, node(3, zone="a", disk="fast"))[0].strategy == "STRICT_PACK"
    assert placed(both, 1, node(3, zone="a"), node(3, disk="fast"))[0].strategy == "PACK"


@pytest.mark.parametrize(
    ("labels", "nodes", "message"),
    [
        (({"zone": "a"}, {}), [node(8)], r"target\.node_labels: no node of the cluster has zone=a; correct it"),
        (({}, {"zone": "a"}), [node(8)], r"drafter\.node_labels: no node of the cluster has zone=a"),
        (({"zone": "a"}, {}), [node(8), node(1, zone="a")], r"2 GPUs and 3 CPUs with zone=a there, which no node"),
        (({"zone": "a"}, {}), [node(8, zone="b")], r"target\.node_labels: no node of the cluster has zone=a"),
    ],
)
def test_labels_that_no_node_carries_are_refused(
    labels: tuple[dict[str, str], dict[str, str]], nodes: list[Node], message: str
) -> None:
    placement, _ = placed(config(labels=labels), 1, *nodes)
    with pytest.raises(ConfigError, match=message):
        check_cluster_can_hold(placement, 1, nodes)


def test_a_cluster_that_fits_exactly_is_fine() -> None:
    for nodes in ([node(3, 4)], [node(2, 3), node(1, 1)]):
        check_cluster_can_hold(placed(config(), 1, *nodes)[0], 1, nodes)


@pytest.mark.parametrize(
    ("replicas", "only", "message"),
    [
        (1, node(2, 64), r"target\.tensor_parallel_size: 1 replica of 2 target and 1 drafter.*3 GPUs.*has 2"),
        (1, node(0, 64), r"3 GPUs, the cluster has 0"),
        (2, node(3, 64), r"serving\.num_replicas: 2 replicas.*6 GPUs, the cluster has 3"),
        (1, node(8, 3), r"4 logical CPUs, the cluster has 3"),
    ],
)
def test_what_a_cluster_lacks_is_named(replicas: int, only: Node, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster_can_hold(placement_of(config(), on_gpu=True), replicas, [only])


@pytest.mark.parametrize(
    ("ranks", "nodes", "message"),
    [
        ((4, 1), [node(3, 9), node(3, 9)], r"target\.tensor_parallel_size: 4 target ranks on one node.*4 GPUs"),
        ((1, 2), [node(1, 9)] * 3, r"drafter\.tensor_parallel_size: 2 drafter ranks on one node"),
        ((2, 1), [node(4, 1), node(0, 64)], r"2 GPUs and 3 CPUs there, which no node"),
    ],
)
def test_ranks_that_no_node_holds_together_are_refused(ranks: tuple[int, int], nodes: list[Node], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster_can_hold(placed(config(*ranks), 1, *nodes)[0], 1, nodes)


def test_ranks_of_several_stages_may_be_lowered_in_two_ways() -> None:
    target = {"model": "t", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    piped = placement_of(parse_config({"target": target}), on_gpu=True)
    with pytest.raises(ConfigError, match=r"4 target ranks on one node.*lower it or target\.pipeline_parallel_size"):
        check_cluster_can_hold(piped, 1, [node(2, 9)] * 2)


def test_replicas_that_nodes_hold_in_sum_only_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_replicas: 2 times 3 target ranks .* and the cluster's nodes hold 1"):
        check_cluster_can_hold(placed(config(3, 1), 2, node(4), node(2), node(2))[0], 2, [node(4), node(2), node(2)])


def test_a_pool_counts_where_the_cluster_is_looked_at() -> None:
    shared = config(1, 2, placement="pool", num_drafters=2)
    target, pool = placement_of(shared, on_gpu=True), pool_placement_of(shared, on_gpu=True)
    check_cluster_can_hold(target, 3, [node(3), node(4)], pool, 2)
    with pytest.raises(ConfigError, match=r"and a pool of 2 need 7 GPUs, the cluster has 6"):
        check_cluster_can_hold(target, 3, [node(3)] * 2, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node need 3 CPUs"):
        check_cluster_can_hold(target, 3, [node(2, 2)] * 7, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node"):
        check_cluster_can_hold(target, 3, [node(1)] * 7, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.num_drafters: 2 times 2 drafter ranks .* nodes hold 1; lower it"):
        check_cluster_can_hold(target, 3, [node(2), *[node(1)] * 5], pool, 2)


def test_what_no_kind_of_node_could_ever_hold_is_refused() -> None:
    placement, _ = placed(config(4, 1), 1, types=(node(2), node(1)), may_come=True)
    with pytest.raises(
        ConfigError, match=r"4 target ranks .* which no node of the cluster or of serving\.node_types has"
    ):
        check_nodes_hold_a_replica(placement, None, [node(0), node(2)], "the cluster or of serving.node_types")
    check_nodes_hold_a_replica(placement, None, [node(0), node(4)], "them")
