"""Serve's autoscaling of the DrafterPool deployment: the policy's adapter to Serve, as autoscaling.py is for targets.

What targets gain is known to the registry, which verifiers ask once a second. Nothing here waits for its answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

from outrider.actors.serve_seam.autoscaling import Looks, without_delays
from outrider.actors.serving.pool_scaling import PoolLook, PoolPolicy
from outrider.cluster.membership import Work
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import registry_name
from outrider.cluster.scaling_config import POOL_REASONS, PoolScalingConfig

SAID_LATELY_S = 15.0
"""What the registry said longer ago is not known any more."""

LOST_S = 60.0
"""A question that has been out for so long is asked once more, as by a LinkKeeper."""

logger = logging.getLogger("ray.serve.outrider.autoscaling")


def serve_pool_autoscaling(settings: PoolScalingConfig, accelerators: float, app_name: str) -> ServeAutoscaling:
    """For the DrafterPool deployment. accelerators: see PoolPolicy. Without Serve's initial_replicas, with which each
    deploy would begin anew, whatever runs."""
    return without_delays(
        PoolScaling,
        {"app_name": app_name, "settings": settings.model_dump(), "accelerators": accelerators},
        min_replicas=settings.min,
        max_replicas=settings.max,
    )


class PoolScaling(Looks):
    """Serve pickles this module with it, not those that it imports."""

    def __init__(
        self,
        app_name: str,
        settings: Mapping[str, Any],
        accelerators: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._policy = PoolPolicy(PoolScalingConfig(**settings), accelerators)
        self._registry = RegistryCalls(app_name)
        self._tags = {"application": app_name}
        self._wanted = Gauge("outrider_pool_wanted_drafters", "Drafters that there are to be.", ("application",))
        self._reason = Gauge("outrider_pool_reason", "1 for why there are to be so many.", ("application", "reason"))

    def _decide(self, context: AutoscalingContext, now: float) -> int:
        wanted = context.target_num_replicas
        look = PoolLook(now, wanted, len(context.running_replicas), self._registry.work(now))
        decision = self._policy.decide(
            look, context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        )
        if decision.replicas != wanted:
            change = "more" if decision.replicas > wanted else "fewer"
            message = "%s: %s drafters, %d in place of %d: %s"
            logger.info(message, context.app_name, change, decision.replicas, wanted, decision.reason)
        self._wanted.set(decision.replicas, self._tags)
        for reason in POOL_REASONS:
            self._reason.set(float(reason == decision.reason), {**self._tags, "reason": reason})
        return decision.replicas


class RegistryCalls:
    """One call at a time; what it brought is there at a later look."""

    def __init__(self, app_name: str) -> None:
        self._name = registry_name(app_name)
        self._registry: Any = None
        self._asked: Any = None
        self._asked_s = float("-inf")
        self._said: Sequence[Work] | None = None
        self._said_s = float("-inf")

    def work(self, now_s: float) -> Sequence[Work] | None:
        """What the registry said last; None: nothing lately."""
        try:
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                answer, self._asked = self._asked, None
                self._said, self._said_s = ray.get(answer), now_s
            if self._asked is None or now_s - self._asked_s >= LOST_S:
                if self._registry is None:
                    self._registry = ray.get_actor(self._name, namespace=NAMESPACE)
                self._asked, self._asked_s = self._registry.work.remote(), now_s
        except (RayError, ValueError):  # it is made anew by whoever misses it first
            self._asked = self._registry = None
        return self._said if now_s - self._said_s < SAID_LATELY_S else None
