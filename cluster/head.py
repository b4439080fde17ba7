"""The head of the cluster, where actors sit that take no room: registry, board, what drafters share.

Ray's autoscaler ends no node that a living actor is on, and the head never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

_HEAD = "node:__internal_head__"
"""Ray's own resource of the head."""


def on_head() -> Any:
    """A scheduling strategy of Ray's, in the cluster that this process is connected to."""
    return on_head_of(ray.nodes())


def on_head_of(nodes: Iterable[Mapping[str, Any]]) -> Any:
    """nodes: as ray.nodes() has them. Anywhere else where there is no head, or no longer."""
    for node in nodes:
        if node["Alive"] and _HEAD in node["Resources"]:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return anywhere()


def anywhere() -> Any:
    """But not on the bundles of the replica that happens to ask first: they go when that replica goes."""
    return PlacementGroupSchedulingStrategy(None)
