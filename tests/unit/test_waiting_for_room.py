"""What a cluster has no room for: what is said of it, and what nodes hold."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import parse_config
from outrider.cluster.placement import placement_of, pool_placement_of
from outrider.deploy.app import has_room


def node(gpus: float, **labels: str) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"GPU": gpus, "CPU": 99.0}, "Labels": labels}


@pytest.mark.parametrize(
    ("nodes", "targets", "drafters", "expected"),
    [
        ([node(8)], 2, 1, False),
        ([node(8), node(2)], 2, 1, True),
        ([node(4), node(4), node(2)], 2, 1, True),
        ([node(4), node(4), node(1), node(1)], 2, 1, False),
        ([node(6), {**node(8), "Alive": False}], 1, 2, False),
        ([node(3), node(3)], 1, 0, False),
        ([], 1, 1, False),
    ],
)
def test_room_is_counted_by_node(nodes: list[dict[str, Any]], targets: int, drafters: int, expected: bool) -> None:
    drafter = {"method": "draft_model", "model": "d", "tensor_parallel_size": 2, "placement": "pool", "num_drafters": 1}
    config = parse_config({"target": {"model": "t", "tensor_parallel_size": 4}, "drafter": drafter})
    pool = pool_placement_of(config, None)
    assert pool is not None
    assert has_room([(placement_of(config, None), targets), (pool, drafters)], nodes) is expected


def test_a_node_has_to_carry_the_labels() -> None:
    config = parse_config({"target": {"model": "t", "node_labels": {"zone": "a"}}})
    wanted = [(placement_of(config, None), 1)]
    assert not has_room(wanted, [node(8, zone="b")])
    assert has_room(wanted, [node(8, zone="a", disk="fast")])
