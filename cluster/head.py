"""Schedules actors that need no resources, such as the registry, on the head node of the cluster.

Ray's autoscaler keeps every node with a living actor, and the head in any case.
"""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HEAD_RESOURCE = "node:__internal_head__"
"""Resource that Ray gives to the head alone: 1."""

_SHARE = 0.001


def on_head() -> dict[str, Any]:
    """Returns Ray's options for an actor on the head. It waits for a head that is gone.

    It asks for the head's resource, as Serve's controller does: with a soft node affinity an actor would land on any
    node whose scheduler has not heard of the head yet.
    """
    return {"num_cpus": 0, "resources": {HEAD_RESOURCE: _SHARE}, **anywhere()}


def anywhere() -> dict[str, Any]:
    """Returns Ray's options for an actor outside the placement group of its creator, which it outlives."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(None)}
