"""Where actors sit that take no room. Ray is scripted: it keeps options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME

from outrider.actors.drafter.shared_actor import get_or_create
from outrider.actors.drafter.suffix_pool import SuffixPool
from outrider.cluster.head import HEAD_RESOURCE
from outrider.cluster.registry import get_or_create_registry


def test_the_resource_is_ray_s() -> None:
    assert HEAD_RESOURCE == HEAD_NODE_RESOURCE_NAME


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of the actor that was made."""
    options: dict[str, Any] = {}
    actor = SimpleNamespace(remote=lambda *args: None)
    monkeypatch.setattr(
        ray, "remote", lambda kind: SimpleNamespace(options=lambda **given: options.update(given) or actor)
    )
    return options


@pytest.mark.parametrize(
    "make",
    [
        lambda: get_or_create_registry("app"),
        lambda: get_or_create(SuffixPool, "SuffixPool:app", 1024),
    ],
    ids=["registry", "suffix pool"],
)
def test_what_takes_no_room_keeps_no_other_node(make: Any, made: dict[str, Any]) -> None:
    make()
    assert made["num_cpus"] == 0
    assert made["resources"] == {HEAD_RESOURCE: 0.001}
    assert made["scheduling_strategy"].placement_group is None


def test_what_takes_room_goes_where_that_is(made: dict[str, Any]) -> None:
    get_or_create(SuffixPool, "Trainer:app", num_cpus=1.0, num_gpus=1.0)
    assert made["num_gpus"] == 1.0
    assert "resources" not in made, "a head without processors would never have it"
    assert made["scheduling_strategy"].placement_group is None
