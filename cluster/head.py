"""The head of the cluster, where actors sit that take no room: registry, board, what drafters share.

Ray's autoscaler ends no node that a living actor is on, and the head never.
"""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HEAD_RESOURCE = "node:__internal_head__"
"""Ray's own, of the head alone: 1."""

_SHARE = 0.001


def on_head() -> dict[str, Any]:
    """Ray's options for such an actor, which waits for a head that is gone.

    By the resource, as Serve does it for its controller: where a node is named instead, and others may do, an actor
    lands on whichever node schedules it without having heard of the head yet.
    """
    return {"num_cpus": 0, "resources": {HEAD_RESOURCE: _SHARE}, **anywhere()}


def anywhere() -> dict[str, Any]:
    """Ray's options of where: not on the bundles of the replica that happens to ask first, they go when that goes."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(None)}
