"""Serve's autoscaling of the Target deployment: the policy's adapter to Serve, without a policy of its own.

Serve makes a TargetScaling in its controller, and calls it in every turn of its control loop, some ten times a second,
with what the replicas' ``record_autoscaling_stats`` said and how many requests wait in callers' routers. What the
controller does not hear of comes from a board (outrider.actors.serving.scaling_board). Nothing here waits for anything:
the controller would stand still meanwhile.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext, AutoscalingPolicy
from ray.util.metrics import Gauge

from outrider.actors.serve_seam import leans_on
from outrider.actors.serving.autoscaling import Decision, Look, Report, ScalingPolicy
from outrider.actors.serving.scaling_board import Scaling, make_board
from outrider.cluster.scaling_config import REASONS, AutoscalingConfig

REPORT_EVERY_S = 1.0
"""How often replicas and callers' routers tell the controller."""

LOOK_BACK_S = 5.0
"""Over which Serve takes the mean of what waits at callers."""

LOOK_EVERY_S = 1.0

REPORT_LASTS_S = 15.0
"""A replica that was silent for so long is one whose load is not known."""

BOARD_PATIENCE_S = 15.0
"""A board that has not answered for so long is made anew."""

logger = logging.getLogger("ray.serve.outrider.autoscaling")


def serve_autoscaling(settings: AutoscalingConfig, app_name: str) -> ServeAutoscaling:
    """For the Target deployment."""
    return without_delays(
        TargetScaling,
        {"app_name": app_name, "settings": settings.model_dump()},
        min_replicas=settings.min,
        max_replicas=settings.max,
    )


def without_delays(policy: type, arguments: Mapping[str, Any], **limits: int) -> ServeAutoscaling:
    """policy: a class that Serve makes one object of, with these arguments. Delays are its own, so Serve's are none."""
    with warnings.catch_warnings():
        # Serve says that a variable will be in place of metrics_interval_s, which this Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ServeAutoscaling(
            **limits,
            metrics_interval_s=REPORT_EVERY_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function=f"{policy.__module__}:{policy.__name__}",
                policy_kwargs=dict(arguments),
            ),
        )


class Looks:
    """A policy as Serve calls it: it looks once a second, and where it fails the number stays as it is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        leans_on.CONTROLLER.check()
        self._clock = clock
        self._looked_s = float("-inf")
        self._failing = False

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = self._clock()
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            try:
                number = self._decide(context, now)
                self._failing = False
                return number, {}
            except Exception:
                # Raised here it would end the control loop's turn for every application of the cluster.
                if not self._failing:
                    logger.exception("autoscaling of %s failed; its number stays as it is", context.deployment_name)
                self._failing = True
        return context.target_num_replicas, {}

    def _decide(self, context: AutoscalingContext, now: float) -> int:
        raise NotImplementedError


class TargetScaling(Looks):
    """Serve pickles this module with it, not those that it imports."""

    def __init__(self, app_name: str, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._settings = AutoscalingConfig(**settings)
        self._policy = ScalingPolicy(self._settings)
        self._reports = LatestReports()
        self._board = BoardCalls(app_name)
        self._gauges = Gauges(app_name)
        self._decision: Decision | None = None

    def _decide(self, context: AutoscalingContext, now: float) -> int:
        replicas = [replica.unique_id for replica in context.running_replicas]
        refused = self._board.look(self._scaling(context, len(replicas)), now)
        reports = self._reports.update(replicas, context.raw_metrics or {}, now)
        look = Look(now, context.target_num_replicas, reports, context.total_queued_requests or 0.0, refused)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        decision = self._policy.decide(look, least, most)
        if decision.replicas != look.wanted:
            change = "more" if decision.replicas > look.wanted else "fewer"
            logger.info(
                "%s: %s target replicas, %d in place of %d: %s",
                context.app_name,
                change,
                decision.replicas,
                look.wanted,
                decision.reason,
            )
        self._decision = decision
        self._gauges.set(decision, len(replicas))
        return decision.replicas

    def _scaling(self, context: AutoscalingContext, running: int) -> Scaling | None:
        """As of the last decision."""
        if self._decision is None:
            return None
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return Scaling(context.target_num_replicas, running, least, most, self._decision.reason)


class LatestReports:
    """What each replica said last, and whether it has said anything lately: told by when it came, on the controller's
    own clock, since the replicas' may show anything."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, float]] = {}
        """By replica: the time that it gave, and when that was new."""

    def update(
        self, replicas: list[str], metrics: Mapping[str, Mapping[Any, Any]], now_s: float
    ) -> dict[str, Report | None]:
        """metrics: as in AutoscalingContext.raw_metrics, by name and replica."""
        latest: dict[str, dict[str, float]] = {}
        times: dict[str, float] = {}
        for name, by_replica in metrics.items():
            for replica, series in by_replica.items():
                if series:
                    latest.setdefault(replica.unique_id, {})[name] = series[-1].value
                    times[replica.unique_id] = max(times.get(replica.unique_id, 0.0), series[-1].timestamp)
        self._said = {replica: said for replica, said in self._said.items() if replica in replicas}
        found: dict[str, Report | None] = dict.fromkeys(replicas)
        for replica in found:
            if replica not in times:
                continue
            if replica not in self._said or self._said[replica][0] != times[replica]:
                self._said[replica] = (times[replica], now_s)
            if now_s - self._said[replica][1] < REPORT_LASTS_S:
                found[replica] = Report.of(latest[replica])
        return found


class BoardCalls:
    """One call at a time; what it brought is there at a later look."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._board: Any = None
        self._asked: tuple[float, Any] | None = None
        self._made_s = self._known_s = float("-inf")

    def look(self, scaling: Scaling | None, now_s: float) -> int | None:
        """See Notes.look. An answer that is late is 0 for a while, and None then: it may have been lost."""
        refused = None
        try:
            if self._asked is not None:
                asked_s, answer = self._asked
                if not ray.wait([answer], timeout=0)[0]:
                    if now_s - asked_s > BOARD_PATIENCE_S:
                        self._asked = self._board = None
                    return 0 if now_s - self._known_s < BOARD_PATIENCE_S else None
                self._asked = None
                refused = ray.get(answer)
                if refused is not None:
                    self._known_s = now_s
            if self._board is None:
                if now_s - self._made_s < BOARD_PATIENCE_S:
                    return None
                self._made_s = now_s
                self._board = make_board(self._app_name)
            self._asked = (now_s, self._board.look.remote(scaling))
        except (RayError, ValueError) as error:
            logger.warning("the board of autoscaling is lost, and made anew: %s", error)
            self._asked = self._board = None
        return refused


class Gauges:
    """In Ray's metrics, of the controller."""

    def __init__(self, app_name: str) -> None:
        self._tags = {"application": app_name}
        names = tuple(self._tags)
        self._wanted = Gauge("outrider_autoscaling_wanted_replicas", "Target replicas that there are to be.", names)
        self._running = Gauge("outrider_autoscaling_running_replicas", "Target replicas that can answer.", names)
        self._reason = Gauge("outrider_autoscaling_reason", "1 for why there are to be so many.", (*names, "reason"))

    def set(self, decision: Decision, running: int) -> None:
        self._wanted.set(decision.replicas, self._tags)
        self._running.set(running, self._tags)
        for reason in REASONS:
            self._reason.set(float(reason == decision.reason), {**self._tags, "reason": reason})
