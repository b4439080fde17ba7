"""Serve's autoscaling policy of the DrafterPool deployment. What targets gain comes from the registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext

from outrider.actors.serve_seam.autoscaling import PeriodicPolicy, with_policy
from outrider.actors.serving.autoscaling import Decision
from outrider.actors.serving.pool_scaling import PoolPolicy
from outrider.cluster.membership import Work
from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import registry_name
from outrider.cluster.scaling_config import POOL_REASONS, PoolScalingConfig

ANSWER_LASTS_S = 15.0
"""Older answers of the registry do not count."""

LOST_S = 60.0
"""An unanswered question is asked again after so long."""


def serve_pool_autoscaling(settings: PoolScalingConfig, accelerators: float, app_name: str) -> ServeAutoscaling:
    """Builds the DrafterPool deployment's ``autoscaling_config``. accelerators: see PoolPolicy."""
    arguments = {"app_name": app_name, "settings": settings.model_dump(), "accelerators": accelerators}
    return with_policy(PoolScaling, settings, arguments)


class PoolScaling(PeriodicPolicy):
    """Serve pickles this module with it, not those that it imports."""

    def __init__(
        self,
        app_name: str,
        settings: Mapping[str, Any],
        accelerators: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("pool", POOL_REASONS, clock)
        self._policy = PoolPolicy(PoolScalingConfig(**settings), accelerators)
        self.registry = RegistryCalls(app_name)

    def decide(self, context: AutoscalingContext, now: float) -> Decision:
        running = len(context.running_replicas)
        return self._policy.decide(now, context.target_num_replicas, running, self.registry.work(now))


class RegistryCalls:
    """Asks the registry without waiting, one call at a time; a later call of `work` returns the answer."""

    def __init__(self, app_name: str) -> None:
        self._name = registry_name(app_name)
        self._registry: Any = None
        self._asked: Any = None
        self._asked_s = float("-inf")
        self._answer: Sequence[Work] | None = None
        self._answered_s = float("-inf")

    def work(self, now_s: float) -> Sequence[Work] | None:
        """Returns the work of each target; None: not known lately."""
        try:
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                answer, self._asked = self._asked, None
                self._answer, self._answered_s = ray.get(answer), now_s
            if self._asked is None or now_s - self._asked_s >= LOST_S:
                if self._registry is None:
                    self._registry = ray.get_actor(self._name, namespace=NAMESPACE)
                self._asked, self._asked_s = self._registry.work.remote(), now_s
        except (RayError, ValueError):  # targets make a lost registry anew
            self._asked = self._registry = None
        return self._answer if now_s - self._answered_s < ANSWER_LASTS_S else None
