"""Serve's autoscaling policy of the Target deployment, as a class that Serve's controller makes one object of.

Serve calls it some ten times a second, in the control loop of all applications: nothing here may block or raise.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext, AutoscalingPolicy
from ray.util.metrics import Gauge

from outrider.actors.serving.autoscaling import Decision, Report, ScalingPolicy
from outrider.cluster.scaling_config import REASONS, AutoscalingConfig, PoolScalingConfig

REPORT_EVERY_S = 1.0
"""How often replicas and callers' routers report to the controller."""

LOOK_BACK_S = 5.0
"""Over which Serve averages the requests that wait in callers' routers."""

LOOK_EVERY_S = 1.0

REPORT_LASTS_S = 15.0
"""Older reports do not count."""

logger = logging.getLogger("ray.serve.outrider.autoscaling")


def serve_autoscaling(settings: AutoscalingConfig) -> ServeAutoscaling:
    """Builds the Target deployment's ``autoscaling_config``."""
    return with_policy(TargetScaling, settings, {"settings": settings.model_dump()})


def with_policy(
    policy: type, settings: AutoscalingConfig | PoolScalingConfig, arguments: Mapping[str, Any]
) -> ServeAutoscaling:
    """Builds an ``autoscaling_config`` whose policy is policy(**arguments), with limits and delays of settings."""
    with warnings.catch_warnings():
        # metrics_interval_s is deprecated in favour of a variable that this Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscaling(
            min_replicas=settings.min,
            max_replicas=settings.max,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            metrics_interval_s=REPORT_EVERY_S,
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(
                policy_function=f"{policy.__module__}:{policy.__name__}", policy_kwargs=dict(arguments)
            ),
        )


class PeriodicPolicy:
    """Decides once a second, logs and exports why, and keeps the number of replicas when deciding fails."""

    def __init__(self, name: str, reasons: tuple[str, ...], clock: Callable[[], float]) -> None:
        """name: of the metric, ``ray_outrider_NAME_reason``."""
        self.clock = clock
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
    """Serve pickles this module with it, not those that it imports."""

    def __init__(self, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("autoscaling", REASONS, clock)
        self._policy = ScalingPolicy(AutoscalingConfig(**settings))

    def decide(self, context: AutoscalingContext, now: float) -> Decision:
        return self._policy.decide(
            now,
            context.target_num_replicas,
            context.capacity_adjusted_min_replicas,
            reports_of(context),
            context.total_queued_requests or 0.0,
        )


def reports_of(context: AutoscalingContext) -> dict[str, Report | None]:
    """Returns each running replica's last report; None where it is incomplete or older than REPORT_LASTS_S."""
    oldest = (context.current_time or 0.0) - REPORT_LASTS_S
    metrics = context.raw_metrics or {}
    found: dict[str, Report | None] = {}
    for replica in context.running_replicas:
        series = {field.name: metrics.get(field.name, {}).get(replica) for field in fields(Report)}
        latest = {name: points[-1] for name, points in series.items() if points}
        is_fresh = len(latest) == len(series) and all(point.timestamp >= oldest for point in latest.values())
        found[replica.unique_id] = Report(**{name: p.value for name, p in latest.items()}) if is_fresh else None
    return found
