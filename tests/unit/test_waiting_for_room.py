"""What a cluster has no room for: what is said of it, and what nodes hold."""

from __future__ import annotations

import inspect
import io
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private import deployment_state
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from outrider.cluster.config import parse_config
from outrider.cluster.placement import placement_of, pool_placement_of
from outrider.deploy import server
from outrider.deploy.app import has_room
from outrider.deploy.processes import StopSignal
from outrider.deploy.progress import Progress
from outrider.deploy.server import UNSCHEDULED, Server
from tests.support.clock import Clock

WAITS = f"Deployment 'Target' has 1 replicas that have taken more than 30s {UNSCHEDULED}. Resources required: ..."


def test_what_waits_for_room_is_said_once_a_minute_in_rays_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said, clock = io.StringIO(), Clock()
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=clock))
    serving = Server(parse_config({"target": {"model": "t"}}), StopSignal(), Progress(said))
    other = f"{WAITS} And of another node."
    for clock.now, message in ((0.0, WAITS), (20.0, WAITS), (40.0, ""), (59.0, WAITS), (70.0, WAITS), (90.0, other)):
        serving._report_troubles(application(Target=message, Ingress="starts slowly"))
    lines = [line.partition("] ")[2] for line in said.getvalue().splitlines()]
    assert lines == [f"WARNING: Target: {message}" for message in (WAITS, WAITS, other)]


def application(**messages: str) -> ApplicationStatusOverview:
    status, trigger = DeploymentStatus.UPDATING, DeploymentStatusTrigger.AUTOSCALING
    deployments = {
        name: DeploymentStatusOverview(status=status, status_trigger=trigger, replica_states={}, message=message)
        for name, message in messages.items()
    }
    return ApplicationStatusOverview("DEPLOYING", "", 0.0, deployments)


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
