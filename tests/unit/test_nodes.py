"""What nodes hold: a cluster too small is refused instead of waited for, and a replica is kept on one node."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, NodeType, OutriderConfig, parse_config
from outrider.cluster.head import HEAD_RESOURCE
from outrider.cluster.nodes import (
    Node,
    Unit,
    Wanted,
    all_there_may_be,
    check_cluster_can_hold,
    check_nodes_hold_each,
    kept_together,
    most_beside,
)
from outrider.cluster.placement import ReplicaPlacement, placement_of, pool_placement_of
from outrider.deploy.app import ReplicaPlan
from outrider.deploy.nodes import can_surge, check_nodes
from outrider.deploy.nodes import placed as placed_by_plan

SERVING = ("num_replicas", "autoscaling", "node_types", "surge")


def config(
    target_ranks: int = 2,
    drafter_ranks: int = 1,
    labels: tuple[dict[str, str], dict[str, str]] = ({}, {}),
    **others: Any,
) -> OutriderConfig:
    """others: of the drafter's section, or of serving's."""
    target = {"model": "t", "tensor_parallel_size": target_ranks, "node_labels": labels[0]}
    own = {"method": "draft_model", "model": "d", "tensor_parallel_size": drafter_ranks, "node_labels": labels[1]}
    serving = {name: others.pop(name) for name in SERVING if name in others}
    may_come = {"nodes_may_come": True} if "node_types" in serving else {}
    return parse_config({"target": target, "drafter": {**own, **others}, "serving": {**serving, **may_come}})


def plan_of(config: OutriderConfig) -> ReplicaPlan:
    pooled = drafter if (drafter := config.remote_drafter) is not None and drafter.pooled else None
    pool = pool_placement_of(config, True)
    if pooled is None:
        return ReplicaPlan(placement_of(config, True), None)
    sizes = pooled.least_drafters, pooled.most_drafters, pooled.autoscaling is not None
    return ReplicaPlan(placement_of(config, True), None, (), pool, *sizes)


def kind(gpus: float, most: int | None = None, **labels: str) -> dict[str, Any]:
    return {"cpus": 99, "gpus": gpus, "max": most, "labels": labels}


def node(gpus: float, cpus: float = 99.0, **labels: str) -> Node:
    return Node({"GPU": gpus, "CPU": cpus} if gpus else {"CPU": cpus}, labels)


def placed(
    config: OutriderConfig, replicas: int, *nodes: Node, may_come: bool = False
) -> tuple[ReplicaPlacement, str | None]:
    return kept_together(placement_of(config, on_gpu=True), replicas, nodes, others_may_come=may_come)


def check(
    placement: ReplicaPlacement,
    replicas: int,
    nodes: Sequence[Node],
    pool: ReplicaPlacement | None = None,
    drafters: int = 0,
) -> None:
    shared = [] if pool is None else [Wanted(pool, drafters, "drafter.num_drafters")]
    check_cluster_can_hold([Wanted(placement, replicas, "serving.num_replicas"), *shared], nodes)


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
    check(placement, replicas, nodes)


def test_why_it_is_not_says_what_is_lacking() -> None:
    _, why_not = placed(config(), 2, node(3), node(2), node(1))
    assert why_not == (
        "2 target ranks and 1 drafter rank on one node need 3 GPUs and 4 CPUs there, "
        "of which the cluster's nodes hold 1"
    )


def test_where_nodes_may_come_of_which_nothing_is_known_one_that_is_there_is_enough() -> None:
    assert placed(config(), 1, node(0), may_come=True)[0].strategy == "PACK"
    assert placed(config(), 2, node(3), may_come=True)[0].strategy == "STRICT_PACK", "more like it may come"


@pytest.mark.parametrize(
    ("types", "replicas", "strategy"),
    [
        ([kind(2), kind(4)], 3, "STRICT_PACK"),
        ([kind(2), kind(1)], 1, "PACK"),
        ([kind(2), kind(4, 2)], 2, "STRICT_PACK"),
        ([kind(2), kind(4, 1)], 2, "PACK"),
    ],
)
def test_where_kinds_of_nodes_are_known_they_decide(
    types: list[dict[str, Any]], replicas: int, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(num_replicas=replicas, node_types=types)
    found = placed_by_plan(plan_of(wanted), wanted.serving, [node(0)])
    assert found.placement.strategy == strategy
    assert ("and all that may come by serving.node_types hold" in caplog.text) == (strategy == "PACK")
    check_nodes(found, wanted.serving, [node(0)])


def test_what_is_alone_in_its_group_stays_together_whatever_there_is() -> None:
    alone = parse_config({"target": {"model": "t", "tensor_parallel_size": 4}})
    assert placed(alone, 1, node(1)) == (placement_of(alone, on_gpu=True), None)


def test_target_and_drafter_that_want_nodes_of_other_labels_are_apart() -> None:
    apart = config(labels=({"role": "target"}, {"role": "drafter"}))
    nodes = [node(8, role="target"), node(8, role="drafter")]
    placement, why_not = placed(apart, 1, *nodes)
    assert (placement.strategy, placement.labels) == ("PACK", ({"role": "target"}, {"role": "drafter"}))
    assert why_not == "target.node_labels and drafter.node_labels want another role each"
    check(placement, 1, nodes)
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
        check(placement, 1, nodes)


def test_a_cluster_that_fits_exactly_is_fine() -> None:
    for nodes in ([node(3, 4)], [node(2, 3), node(1, 1)]):
        check(placed(config(), 1, *nodes)[0], 1, nodes)


@pytest.mark.parametrize(
    ("replicas", "nodes", "message"),
    [
        (1, [node(2, 64)], r"target\.tensor_parallel_size: 2 target ranks and 1 drafter rank .* need 3 GPUs"),
        (1, [node(0, 64)], r"3 GPUs and 4 CPUs there, which no node of the cluster has; lower it"),
        (2, [node(3, 64)], r"serving\.num_replicas: 2 times 2 target ranks .* there, 2 times, and .* nodes hold 1"),
        (
            1,
            [node(8, 3)],
            r"4 CPUs there, which no node .* add a node that does \(`ray start --num-gpus`, `--num-cpus`",
        ),
        (1, [], r"target\.tensor_parallel_size: .* which no node of the cluster has"),
    ],
)
def test_what_a_cluster_lacks_is_named(replicas: int, nodes: list[Node], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(placement_of(config(), on_gpu=True), replicas, nodes)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"num_drafters": 3}, r"^drafter\.num_drafters: 3 times 1 drafter rank .* beside 4 target ranks .* hold 2;"),
        ({"autoscaling": {"min": 3, "max": 3}}, r"^drafter\.autoscaling\.min: 3 times 1 drafter rank"),
        ({"autoscaling": {"min": 3, "max": 4}}, r"^drafter\.autoscaling\.min: 3 times 1 drafter rank"),
    ],
)
def test_a_pool_that_is_too_large_is_what_is_named(pool: dict[str, Any], message: str) -> None:
    """And not the target, which has its place."""
    wanted = config(4, 1, placement="pool", **pool) if "num_drafters" in pool else scaled_pool(**pool)
    with pytest.raises(ConfigError, match=message):
        check_nodes(plan_of(wanted), wanted.serving, [node(4), node(2)])


def scaled_pool(autoscaling: dict[str, int]) -> OutriderConfig:
    drafter = {"method": "draft_model", "model": "d", "placement": "pool", "autoscaling": autoscaling}
    return parse_config({"target": {"model": "t", "tensor_parallel_size": 4}, "drafter": drafter})


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
        check(placed(config(*ranks), 1, *nodes)[0], 1, nodes)


def test_ranks_of_several_stages_may_be_lowered_in_two_ways() -> None:
    target = {"model": "t", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    piped = placement_of(parse_config({"target": target}), on_gpu=True)
    with pytest.raises(ConfigError, match=r"4 target ranks on one node.*lower it or target\.pipeline_parallel_size"):
        check(piped, 1, [node(2, 9)] * 2)


def test_replicas_that_nodes_hold_in_sum_only_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_replicas: 2 times 3 target ranks .* and the cluster's nodes hold 1"):
        check(placed(config(3, 1), 2, node(4), node(2), node(2))[0], 2, [node(4), node(2), node(2)])


def test_a_pool_counts_where_the_cluster_is_looked_at() -> None:
    shared = config(1, 2, placement="pool", num_drafters=2)
    target, pool = placement_of(shared, on_gpu=True), pool_placement_of(shared, on_gpu=True)
    check(target, 3, [node(3), node(4)], pool, 2)
    with pytest.raises(ConfigError, match=r"num_drafters: 2 times 2 drafter ranks .* beside 3 times 1 target rank the"):
        check(target, 3, [node(3)] * 2, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node need 3 CPUs"):
        check(target, 3, [node(2, 2)] * 7, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 2 drafter ranks on one node"):
        check(target, 3, [node(1)] * 7, pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.num_drafters: 2 times 2 drafter ranks .* nodes hold 1; lower it"):
        check(target, 3, [node(2), *[node(1)] * 5], pool, 2)


def test_what_no_kind_of_node_could_ever_hold_is_refused() -> None:
    wanted = [Wanted(placed(config(4, 1), 1, node(2), node(1))[0], 1, "serving.num_replicas")]
    with pytest.raises(
        ConfigError, match=r"4 target ranks .* which no node of the cluster or of serving\.node_types has"
    ):
        check_nodes_hold_each(wanted, [node(0), node(2)], "the cluster or of serving.node_types")
    check_nodes_hold_each(wanted, [node(0), node(4)], "them")


def test_replicas_and_drafters_that_fit_one_by_one_and_not_together_are_refused() -> None:
    shared = config(4, 3, placement="pool", num_drafters=2)
    target, pool = placement_of(shared, on_gpu=True), pool_placement_of(shared, on_gpu=True)
    check(target, 1, [node(4), node(4), node(3)], pool, 2)
    with pytest.raises(
        ConfigError,
        match=r"drafter\.num_drafters: 2 times 3 drafter ranks .* and beside 4 target ranks the cluster's nodes "
        r"hold 1; lower it, or add nodes",
    ):
        check(target, 1, [node(4), node(4), node(2)], pool, 2)
    with pytest.raises(ConfigError, match=r"drafter\.tensor_parallel_size: 3 drafter ranks .* hold none; lower"):
        check(target, 1, [node(4), node(2), node(2)], pool, 1)
    apart = replace(placement_of(config(4, 3), on_gpu=True), strategy="PACK")
    with pytest.raises(ConfigError, match=r"num_replicas: 2 times 3 drafter .* beside 2 times 4 target .* hold 1;"):
        check(apart, 2, [node(4), node(8), node(2)])


def test_places_are_counted_as_by_trying_them_all() -> None:
    dice = random.Random(1)
    for _ in range(150):
        nodes = [
            Node({"GPU": dice.randint(0, 6), "CPU": dice.randint(0, 9)}, dice.choice(({}, {"zone": "a"})))
            for _ in range(dice.randint(1, 4))
        ]
        one, two = (
            Unit("target", "", {"GPU": dice.randint(0, 3), "CPU": dice.randint(1, 3)}, dice.choice(({}, {"zone": "a"})))
            for _ in range(2)
        )
        number = dice.randint(0, 4)
        tried = [sum(rooms) for rooms in trials(one, number, two, nodes)]
        assert most_beside(one, number, two, nodes) == max(tried, default=0)


def trials(one: Unit, number: int, two: Unit, nodes: Sequence[Node]) -> Iterator[list[int]]:
    for shares in itertools.product(range(number + 1), repeat=len(nodes)):
        pairs = list(zip(nodes, shares, strict=True))
        if sum(shares) == number and all(share <= node.room_for(one) for node, share in pairs):
            yield [node.without(one, share).room_for(two) for node, share in pairs]


def test_many_nodes_alike_take_no_longer_than_others() -> None:
    """Where each had to be tried with each, this would not end."""
    one, two = Unit("target", "", {"GPU": 3.0}), Unit("drafter", "", {"GPU": 2.0})
    assert most_beside(one, 100, two, [node(8)] * 100) == 250
    assert most_beside(one, 200, two, [node(8)] * 100) == 100


@pytest.mark.parametrize(
    ("types", "nodes", "there"),
    [
        ([kind(4, 2)], [], [4, 4]),
        ([kind(4, 2)], [node(4)], [4, 4]),
        ([kind(4, 2)], [node(4), node(4), node(4)], [4, 4, 4]),
        ([kind(4, 2)], [node(3)], [3, 4, 4]),
        ([kind(4, 1)], [node(4, 98)], [4, 4]),
        ([kind(4, 1)], [node(4, zone="a", arch="x")], [4]),
        ([kind(4, 1, zone="a")], [node(4)], [4, 4]),
        ([kind(4)], [node(4)], [4] * 6),
        ([kind(4, 9)], [], [4] * 5),
        ([kind(0, 1)], [node(0)], [0]),
    ],
)
def test_todays_nodes_are_among_those_that_there_may_be_once(
    types: list[dict[str, Any]], nodes: list[Node], there: list[float]
) -> None:
    found = all_there_may_be(nodes, [NodeType(**each) for each in types], 5)
    assert [node.resources.get("GPU", 0) for node in found] == there


def test_a_node_of_two_kinds_counts_as_the_one_with_more_labels() -> None:
    types = [NodeType(**kind(4, 1)), NodeType(**kind(4, 1, zone="a"))]
    found = all_there_may_be([node(4, zone="a")], types, 9)
    assert [each.labels for each in found] == [{"zone": "a"}, {}]
    found = all_there_may_be([node(4, zone="a"), node(4, zone="a")], types, 9)
    assert len(found) == 2, "the other one has come as the kind without labels"


def test_the_head_has_not_come_as_any_kind() -> None:
    head = Node({"GPU": 4.0, "CPU": 99.0, HEAD_RESOURCE: 1.0})
    assert len(all_there_may_be([head], [NodeType(**kind(4, 1))], 9)) == 2


ONE_OF_EACH = [kind(4, 1), kind(1, 1)]


@pytest.mark.parametrize(
    ("wanted", "nodes", "message"),
    [
        (
            config(4, 1, placement="pool", num_replicas=5, node_types=ONE_OF_EACH),
            [],
            r"serving\.num_replicas: 5 times 4 target ranks .* all that may come by serving\.node_types hold 1; "
            r"lower it, or raise serving\.node_types\.max",
        ),
        (
            config(4, 1, placement="pool", num_drafters=2, node_types=ONE_OF_EACH),
            [],
            r"drafter\.num_drafters: 2 times 1 drafter rank .* beside 4 target ranks .* hold 1; lower it",
        ),
        (
            config(4, 1, placement="pool", autoscaling={"min": 2, "max": 9}, node_types=ONE_OF_EACH),
            [node(4)],
            r"serving\.autoscaling\.min: 2 times 4 target ranks .* hold 1",
        ),
    ],
)
def test_what_must_be_there_and_never_will_be_is_refused(
    wanted: OutriderConfig, nodes: list[Node], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_nodes(plan_of(wanted), wanted.serving, nodes)


@pytest.mark.parametrize(
    ("types", "nodes", "waits"),
    [
        ([kind(4, 2), kind(1, 2)], [], True),
        ([kind(4), kind(1, 2)], [], True),
        (ONE_OF_EACH, [node(5), node(1, 98)], True),
        (ONE_OF_EACH, [node(9), node(1, 98)], False),
        ([], [], True),
    ],
)
def test_what_may_still_be_there_is_waited_for(
    types: list[dict[str, Any]], nodes: list[Node], waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = config(4, 1, placement="pool", num_replicas=2, num_drafters=2, node_types=types)
    check_nodes(plan_of(wanted), wanted.serving, nodes)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["waiting for nodes"] * waits


@pytest.mark.parametrize(
    ("scaled", "most", "message"),
    [
        ({"autoscaling": {"max": 9}}, 1, "serving.autoscaling.max: 9 times 4 target ranks"),
        ({"autoscaling": {"max": 9}}, None, None),
        ({"pool": {"min": 1, "max": 3}}, 1, "drafter.autoscaling.max: 3 times 1 drafter rank"),
        ({"pool": {"min": 1, "max": 3}}, 2, None),
    ],
)
def test_what_may_be_called_for_and_never_will_be_there_is_said_once(
    scaled: dict[str, Any], most: int | None, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    serving = {name: each for name, each in scaled.items() if name != "pool"}
    pool = {"placement": "pool", **({"autoscaling": scaled["pool"]} if "pool" in scaled else {})}
    drafter = {"method": "draft_model", "model": "d", **pool}
    types = {"nodes_may_come": True, "node_types": [kind(4, most), kind(1, most)]}
    target = {"model": "t", "tensor_parallel_size": 4}
    wanted = parse_config({"target": target, "drafter": drafter, "serving": {**serving, **types}})
    with caplog.at_level(logging.WARNING):
        check_nodes(plan_of(wanted), wanted.serving, [node(4), node(1)])
    never = [record.message for record in caplog.records if "never all run" in record.message]
    assert len(caplog.records) == 1
    assert len(never) == (message is not None)
    assert message is None or message in never[0]


@pytest.mark.parametrize(("types", "surges"), [([kind(4, 2)], True), ([kind(4, 1), kind(1)], False), ([], True)])
def test_a_deploy_has_one_more_where_nodes_may_come_that_hold_it(types: list[dict[str, Any]], surges: bool) -> None:
    wanted = config(3, 1, node_types=types)
    assert can_surge(plan_of(wanted), wanted.serving, [node(4)]) is surges
