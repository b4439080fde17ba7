"""What a cluster has no room for: whether a deploy may take more for a while, and what Ray says is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.serve.schema import DeploymentStatusOverview

from outrider.cluster.placement import Bundle, ReplicaPlacement

REPEAT_S = 60.0

UNSCHEDULED = "to be scheduled"
"""In Serve's message of a deployment whose replicas Ray has found no room for."""


class PendingLog:
    """Repeats Ray's own words once a minute while replicas or drafters wait for room."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._said_s: dict[str, float] = {}
        """By deployment."""

    def look(self, deployments: Mapping[str, DeploymentStatusOverview]) -> None:
        """Call often."""
        now = self._clock()
        for name, deployment in deployments.items():
            if UNSCHEDULED not in deployment.message:
                self._said_s.pop(name, None)
            elif now - self._said_s.get(name, float("-inf")) >= REPEAT_S:
                self._said_s[name] = now
                self._say(f"WARNING: {deployment.message}")


def has_room(wanted: Sequence[tuple[ReplicaPlacement, int]], nodes: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether nodes (``ray.nodes()``), were they empty, hold so many of each placement.

    Each goes to the first node with room, so that an arrangement may be missed; one that is found exists.
    """
    free = [(dict(node["Resources"]), node.get("Labels") or {}) for node in nodes if node["Alive"]]

    def take(needs: Bundle, labels: Mapping[str, str]) -> bool:
        for resources, carried in free:
            fits = all(resources.get(name, 0.0) >= count for name, count in needs.items())
            if fits and labels.items() <= carried.items():
                resources.update({name: resources.get(name, 0.0) - count for name, count in needs.items()})
                return True
        return False

    def place(placement: ReplicaPlacement) -> bool:
        if placement.strategy != "STRICT_PACK":
            return all(map(take, placement.bundles, placement.labels))
        names = {name for bundle in placement.bundles for name in bundle}
        return take({name: placement.total(name) for name in names}, placement.labels[0])

    return all(place(placement) for placement, number in wanted for _ in range(number))
