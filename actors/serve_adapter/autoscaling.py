"""Implements Serve's autoscaling policies of the Target and DrafterPool deployments.

The controller makes one object of each, and calls it some ten times a second in the control loop of all applications:
nothing here may block or raise.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext, AutoscalingPolicy
from ray.util.metrics import Gauge

from outrider.actors.serving.autoscaling import REASONS, Decision, Report, ScalingPolicy
from outrider.actors.serving.pool_scaling import POOL_REASONS, PoolPolicy
from outrider.cluster.config import AutoscalingConfig, PoolScalingConfig
from outrider.cluster.drafter_registry import Work
from outrider.cluster.registry import find_registry

REPORT_EVERY_S = LOOK_EVERY_S = 1.0
"""How often replicas and callers' routers report to the controller, and how often a policy looks at that."""

LOOK_BACK_S = 5.0
"""Window in which Serve averages the requests that wait in callers' routers."""

UPSCALE_DELAY_S = 5.0
"""How long a higher number must be desired, without a break, before replicas are started."""

LASTS_S = 15.0
"""Older reports of replicas and answers of the registry do not count."""

LOST_S = 60.0
"""An unanswered question is asked again after so long."""

logger = logging.getLogger("ray.serve.outrider.autoscaling")


def serve_autoscaling(settings: AutoscalingConfig) -> ServeAutoscaling:
    """Builds the Target deployment's ``autoscaling_config``."""
    return _with_policy(TargetScaling, settings)


def serve_pool_autoscaling(settings: PoolScalingConfig, accelerators: float, app_name: str) -> ServeAutoscaling:
    """Builds the DrafterPool deployment's ``autoscaling_config``. accelerators: see PoolPolicy."""
    return _with_policy(PoolScaling, settings, accelerators=accelerators, app_name=app_name)


def _with_policy(policy: type, settings: AutoscalingConfig | PoolScalingConfig, **others: Any) -> ServeAutoscaling:
    name, arguments = f"{policy.__module__}:{policy.__name__}", {"settings": settings.model_dump(), **others}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of metrics_interval_s, which Serve still reads
        return ServeAutoscaling(
            min_replicas=settings.min,
            max_replicas=settings.max,
            upscale_delay_s=UPSCALE_DELAY_S,
            downscale_delay_s=settings.downscale_delay_s,
            metrics_interval_s=REPORT_EVERY_S,
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=name, policy_kwargs=arguments),
        )


class PeriodicPolicy:
    """Decides once a second, logs and exports why, and keeps the number of replicas when deciding fails."""

    def __init__(self, name: str, reasons: tuple[str, ...]) -> None:
        """Registers the metric ``ray_outrider_NAME_reason``."""
        self.clock = time.monotonic
        self._reasons, self._looked_s, self._failing = reasons, float("-inf"), False
        self._decision: Decision | None = None
        self._gauge = Gauge(
            f"outrider_{name}_reason", "1 for the reason of the desired number.", ("application", "reason")
        )

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = self.clock()
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            try:
                self._show(context, self.decide(context, now))
                self._failing = False
            except Exception:
                if not self._failing:
                    logger.exception("autoscaling of %s failed; its number stays as it is", context.deployment_name)
                self._decision, self._failing = None, True
        return context.target_num_replicas if self._decision is None else self._decision.replicas, {}

    def decide(self, context: AutoscalingContext, now: float) -> Decision:
        raise NotImplementedError

    def _show(self, context: AutoscalingContext, decision: Decision) -> None:
        if self._decision is None or decision.reason != self._decision.reason:
            message = "autoscaling of %s: %s (%d replicas desired, %d wanted)"
            numbers = (decision.replicas, context.target_num_replicas)
            logger.info(message, context.deployment_name, decision.reason, *numbers)
        self._decision = decision
        for reason in self._reasons:
            self._gauge.set(float(reason == decision.reason), {"application": context.app_name, "reason": reason})


class TargetScaling(PeriodicPolicy):
    """Scales targets. Serve pickles this module with it, not those that it imports."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__("autoscaling", REASONS)
        self._policy = ScalingPolicy(AutoscalingConfig(**settings))

    def decide(self, context: AutoscalingContext, now: float) -> Decision:
        least, queued = context.capacity_adjusted_min_replicas, context.total_queued_requests or 0.0
        return self._policy.decide(now, context.target_num_replicas, least, reports_of(context), queued)


class PoolScaling(PeriodicPolicy):
    """Scales drafters, by what the registry says of the targets' work."""

    def __init__(self, settings: Mapping[str, Any], accelerators: float, app_name: str) -> None:
        super().__init__("pool", POOL_REASONS)
        self._policy = PoolPolicy(PoolScalingConfig(**settings), accelerators)
        self.registry = WorkPoller(app_name)

    def decide(self, context: AutoscalingContext, now: float) -> Decision:
        running = len(context.running_replicas)
        return self._policy.decide(now, context.target_num_replicas, running, self.registry.work(now))


def reports_of(context: AutoscalingContext) -> dict[str, Report | None]:
    """Returns each running replica's last report; None where it is incomplete or older than LASTS_S."""
    oldest = (context.current_time or 0.0) - LASTS_S
    metrics = context.raw_metrics or {}
    found: dict[str, Report | None] = {}
    for replica in context.running_replicas:
        series = {field.name: metrics.get(field.name, {}).get(replica) for field in fields(Report)}
        latest = {name: points[-1] for name, points in series.items() if points}
        is_fresh = len(latest) == len(series) and all(point.timestamp >= oldest for point in latest.values())
        found[replica.unique_id] = Report(**{name: p.value for name, p in latest.items()}) if is_fresh else None
    return found


class WorkPoller:
    """Asks the registry without waiting, one call at a time; a later call of `work` returns the answer."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._registry: Any = None
        self._asked: Any = None
        self._asked_s = self._answered_s = float("-inf")
        self._answer: Sequence[Work] | None = None

    def work(self, now_s: float) -> Sequence[Work] | None:
        """Returns the work of each target; None: not known lately."""
        try:
            if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
                answer, self._asked = self._asked, None
                self._answer, self._answered_s = ray.get(answer), now_s
            if self._asked is None or now_s - self._asked_s >= LOST_S:
                self._registry = self._registry or find_registry(self._app_name)
                self._asked, self._asked_s = self._registry.work.remote(), now_s
        except (RayError, ValueError):  # targets make a lost registry anew
            self._asked = self._registry = None
        return self._answer if now_s - self._answered_s < LASTS_S else None
