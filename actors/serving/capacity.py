"""How many generations an ingress, its queue and the target replicas hold together: what proxies are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle


@dataclass(frozen=True)
class Capacity:
    """It follows the replicas where their number does: more of them let more in at once."""

    a_replica: int
    queue: int
    replicas: int
    """There always are; while one of them is replaced, what it held waits for the next."""

    running: Callable[[DeploymentHandle], int] | None = None
    """How many there are now; None: their number is fixed."""

    def now(self, target: DeploymentHandle) -> int:
        replicas = self.replicas if self.running is None else max(self.replicas, self.running(target))
        return replicas * self.a_replica + self.queue


def part_of(most: int, parts: int) -> int:
    """Of a limit that several processes keep between them: what each may use. Rounded up, so that nobody has none."""
    return -(-most // parts)
