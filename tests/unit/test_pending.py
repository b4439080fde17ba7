"""What a cluster has no room for: what is said of it, and what nodes hold."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ray.serve._private import deployment_state
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import DeploymentStatusOverview

from outrider.cluster.config import parse_config
from outrider.cluster.placement import placement_of, pool_placement_of
from outrider.deploy.pending import REPEAT_S, UNSCHEDULED, PendingLog, has_room
from tests.clock import Clock

WAITS = f"Deployment 'Target' has 1 replicas that have taken more than 30s {UNSCHEDULED}. Resources required: ..."


def status(message: str = "") -> DeploymentStatusOverview:
    return DeploymentStatusOverview(
        status=DeploymentStatus.UPDATING,
        status_trigger=DeploymentStatusTrigger.AUTOSCALING,
        replica_states={},
        message=message,
    )


def test_what_waits_for_room_is_said_once_a_minute_in_rays_words() -> None:
    said, clock = list[str](), Clock()
    log = PendingLog(said.append, clock)
    for _ in range(int(2.5 * REPEAT_S)):
        log.look({"Target": status(WAITS), "Ingress": status("starts slowly")})
        clock.now += 1
    assert said == [f"WARNING: {WAITS}"] * 3
    log.look({"Target": status()})
    log.look({"Target": status(WAITS)})
    assert len(said) == 4, "what waits anew is said at once"


def test_serve_words_it_so() -> None:
    assert UNSCHEDULED in inspect.getsource(deployment_state)


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
