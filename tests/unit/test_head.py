"""Where actors sit that take no room. Ray is scripted: it says what nodes there are, and keeps options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from outrider.actors.drafter.suffix_pool import SuffixPool
from outrider.actors.serving.scaling_board import make_board
from outrider.actors.shared_actor import get_or_create
from outrider.cluster.head import on_head_of
from outrider.cluster.registry import get_or_create_registry


def node(letter: str, *, head: bool = False, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 2.0, "node:10.0.0.1": 1.0, **({"node:__internal_head__": 1.0} if head else {})}
    return {"NodeID": letter * 56, "Alive": alive, "Resources": resources}


def test_on_the_head_that_lives() -> None:
    nodes = [node("a"), node("b", head=True, alive=False), node("c", head=True), node("d")]
    strategy = on_head_of(nodes)
    assert isinstance(strategy, NodeAffinitySchedulingStrategy)
    assert (strategy.node_id, strategy.soft) == ("c" * 56, True), "elsewhere, once that is gone"


@pytest.mark.parametrize("nodes", [[], [node("a")], [node("a", head=True, alive=False), node("b")]])
def test_where_there_is_no_head_on_no_replicas_bundles(nodes: list[dict[str, Any]]) -> None:
    strategy = on_head_of(nodes)
    assert isinstance(strategy, PlacementGroupSchedulingStrategy)
    assert strategy.placement_group is None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of the actor that was made."""
    options: dict[str, Any] = {}
    actor = SimpleNamespace(remote=lambda *args: None)
    monkeypatch.setattr(ray, "nodes", lambda: [node("a"), node("b", head=True)])
    monkeypatch.setattr(
        ray, "remote", lambda kind: SimpleNamespace(options=lambda **given: options.update(given) or actor)
    )
    return options


@pytest.mark.parametrize(
    "make",
    [
        lambda: get_or_create_registry("app"),
        lambda: make_board("app"),
        lambda: get_or_create(SuffixPool, "SuffixPool:app", 1024),
    ],
    ids=["registry", "board", "suffix pool"],
)
def test_what_takes_no_room_keeps_no_other_node(make: Any, made: dict[str, Any]) -> None:
    make()
    assert made["num_cpus"] == 0
    assert made["scheduling_strategy"].node_id == "b" * 56


def test_what_takes_room_goes_where_that_is(made: dict[str, Any]) -> None:
    get_or_create(SuffixPool, "Trainer:app", num_cpus=1.0, num_gpus=1.0)
    assert made["num_gpus"] == 1.0
    assert made["scheduling_strategy"].placement_group is None, "a head without processors would never have it"
