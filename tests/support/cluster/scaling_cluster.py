"""Replicas that do no work but report that they did, before Serve's own autoscaling state: a second costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    TimeStampedValue,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from outrider.actors.serve_adapter.autoscaling import PeriodicPolicy, serve_autoscaling
from outrider.actors.serving.autoscaling import Report
from outrider.cluster.config import AutoscalingConfig
from tests.support.clock import Clock

SEATS = 16
RATE = 1000.0
"""Tokens a second of one replica."""

TOKENS = 500.0
"""Tokens of a request."""

IDLE = Report(0, 0, SEATS, 0, TOKENS, RATE, 0.0, 0.0)
BUSY = replace(IDLE, running=SEATS, kv_cache_usage=0.5, step_ms=50.0)
DEPLOYMENT = DeploymentID("Target", "app")


def waiting(seconds: float, like: Report = BUSY) -> Report:
    """Return a replica whose waiting requests take it so long."""
    return replace(like, waiting=seconds * RATE / TOKENS, waiting_tokens=seconds * RATE)


class Controller:
    """Serve's own autoscaling state of one deployment, with the clocks that it and the policy go by."""

    def __init__(self, config: ServeAutoscaling, target: int = 0) -> None:
        self.clock, self.target = Clock(1e9), target
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        self.register(config)

    def register(self, config: ServeAutoscaling) -> None:
        """Begin as when the application is deployed."""
        info = SimpleNamespace(
            deployment_config=DeploymentConfig(autoscaling_config=config),
            target_capacity=None,
            target_capacity_direction=None,
            config_changed=lambda other: True,
        )
        self.target = self.state.register(info, self.target)
        self.policy.clock = self.clock

    @property
    def policy(self) -> PeriodicPolicy:
        return self.state._policy.__wrapped__  # out of a pickle, as in the controller

    @property
    def reason(self) -> str:
        assert self.policy._decision is not None
        return self.policy._decision.reason

    @contextmanager
    def _time(self) -> Iterator[None]:
        time = SimpleNamespace(time=lambda: self.clock.now, monotonic=lambda: self.clock.now)
        with (
            mock.patch("ray.serve.autoscaling_policy.time", time),
            mock.patch("ray.serve._private.autoscaling_state.time", time),
        ):
            yield

    def second(self, reports: Mapping[str, Report | None], queued: float = 0.0) -> int:
        """Passes one second, in which these replicas ran. None: it does not report."""
        self.clock.now += 1
        now = self.clock.now
        replicas = {ReplicaID(name, DEPLOYMENT): report for name, report in reports.items()}
        with self._time():
            self.state.update_running_replica_ids(list(replicas))
            for replica, report in replicas.items():
                if report is not None:
                    metrics = {name: [TimeStampedValue(now, value)] for name, value in asdict(report).items()}
                    self.state.record_request_metrics_for_replica(ReplicaMetricReport(replica, metrics, now))
            self.state.record_request_metrics_for_handle(_queue(queued, now))
            self.target = self.state.get_decision_num_replicas(self.target)
        return self.target

    def seconds(self, number: int, *reports: Report | None, queued: float = 0.0) -> list[int]:
        """Returns the targets of each second."""
        named = {f"r{index}": report for index, report in enumerate(reports)}
        return [self.second(named, queued) for _ in range(number)]


def _queue(queued: float, now: float) -> HandleMetricReport:
    series = [TimeStampedValue(now, queued)]
    return HandleMetricReport(DEPLOYMENT, "handle", "actor", DeploymentHandleSource.REPLICA, series, {}, now)


@dataclass
class Cluster:
    """Replicas that do RATE tokens a second each when they have SEATS requests, and take load_s to load.

    Requests beyond seats wait in the engines, beyond `held` in the callers' router, and beyond `queue` are refused.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    load_s: float = 60.0
    held: int = 64
    queue: int = 256
    running: int = 1
    requests: float = 0.0
    now_s: float = 0.0
    coming: list[float] = field(default_factory=list)
    """Return when each will be loaded."""

    history: list[int] = field(default_factory=lambda: [1])
    """Replicas wanted, second by second."""

    reasons: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.controller = Controller(serve_autoscaling(AutoscalingConfig(**self.settings)), 1)

    def run(self, seconds: int, arrivals: Callable[[float], float]) -> None:
        """arrivals: requests that come in the second that begins now."""
        for _ in range(seconds):
            self._second(arrivals(self.now_s))

    def _second(self, arrivals: float) -> None:
        self.now_s += 1
        self.running += sum(ready_s <= self.now_s for ready_s in self.coming)
        self.coming = [ready_s for ready_s in self.coming if ready_s > self.now_s]
        served = min(self.requests + arrivals, self.running * RATE / TOKENS)
        self.requests += arrivals - served
        self.requests = min(self.requests, self.running * self.held + self.queue)
        engines = min(self.requests, self.running * self.held) / self.running
        seated = min(SEATS, max(engines, served / self.running * SEATS * TOKENS / RATE))
        left = max(0.0, engines - SEATS)
        report = Report(seated, left, SEATS, left * TOKENS, TOKENS, RATE, seated / SEATS / 2, 50.0)
        queued = max(0.0, self.requests - self.running * self.held)
        self.controller.seconds(1, *[report] * self.running, queued=queued)
        self.reasons.add(self.controller.reason)
        more = self.controller.target - self.running - len(self.coming)
        self.coming += [self.now_s + self.load_s] * more
        self.running += min(0, more)
        self.history.append(self.controller.target)


def steady(a_second: float) -> Callable[[float], float]:
    return lambda now_s: a_second
