"""The adapter between Serve's controller and the policy, called as Serve's own autoscaling state calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from outrider.actors.serve_seam import autoscaling, leans_on
from outrider.actors.serve_seam.autoscaling import REPORT_LASTS_S, LatestReports, TargetScaling, serve_autoscaling
from outrider.actors.serving.autoscaling import Report
from outrider.cluster.config import ConfigError
from outrider.cluster.scaling_config import AutoscalingConfig
from tests.clock import Clock

DEPLOYMENT = DeploymentID("Target", "app")
A, B = ReplicaID("a", DEPLOYMENT), ReplicaID("b", DEPLOYMENT)

IDLE = Report(0, 0, 16, 0, 500, 1000, 0, 0)
FULL = Report(16, 40, 16, 20_000, 500, 1000, 0.5, 50)


def series(report: Report, *, at_s: float) -> dict[str, list[TimeStampedValue]]:
    return {name: [TimeStampedValue(at_s, getattr(report, name))] for name in Report.__dataclass_fields__}


class Board:
    """In place of the calls to the actor."""

    refused: int | None = 0

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def look(self, scaling: Any, now_s: float) -> int | None:
        self.shown.append(scaling)
        return self.refused


class Controller:
    """Serve's own state of one deployment, with what replicas would have sent. Calls every second."""

    def __init__(self, **settings: float) -> None:
        config = serve_autoscaling(AutoscalingConfig(**settings), "app")
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        info = SimpleNamespace(
            deployment_config=DeploymentConfig(autoscaling_config=config),
            target_capacity=None,
            target_capacity_direction=None,
            config_changed=lambda other: True,
        )
        self.target = self.state.register(info, 0)
        # It comes out of a pickle, as in the controller.
        self.policy._board, self.policy._clock = self.board, self.clock = Board(), Clock(100.0)

    @property
    def policy(self) -> TargetScaling:
        return self.state._policy.__wrapped__

    def seconds(self, number: int, reports: dict[ReplicaID, Report | None]) -> set[int]:
        decided = set()
        for _ in range(number):
            self.clock.now += 1
            self.state.update_running_replica_ids(list(reports))
            for replica, report in reports.items():
                if report is not None:
                    metrics = series(report, at_s=self.clock.now)
                    sent = ReplicaMetricReport(replica_id=replica, timestamp=self.clock.now, metrics=metrics)
                    self.state.record_request_metrics_for_replica(sent)
            self.target = self.state.get_decision_num_replicas(self.target)
            decided.add(self.target)
        return decided


def test_serve_brings_what_replicas_say_to_the_policy_and_its_decision_back() -> None:
    controller = Controller(min=1, max=2, upscale_delay_s=3, downscale_delay_s=20)
    assert controller.target == 1
    assert controller.seconds(10, {A: IDLE}) == {1}
    controller.seconds(6, {A: FULL})
    assert controller.target == 2
    assert controller.seconds(30, {A: IDLE}) == {2}, "the second one is loading"
    assert controller.seconds(19, {A: IDLE, B: IDLE}) == {2}
    controller.seconds(3, {A: IDLE, B: IDLE})
    assert controller.target == 1
    shown = controller.board.shown[-1]
    assert (shown.running, shown.least, shown.most, shown.reason) == (2, 1, 2, "idle")


def test_serve_waits_no_longer_than_the_policy_does() -> None:
    controller = Controller(min=2, max=3, upscale_delay_s=0, downscale_delay_s=0)
    assert controller.target == 2
    controller.seconds(4, {A: FULL, B: FULL})
    assert controller.target == 3


def test_refusals_reach_the_policy() -> None:
    controller = Controller(min=1, max=8, upscale_delay_s=2)
    controller.board.refused = 50
    controller.seconds(6, {A: IDLE})
    assert controller.target > 1
    assert controller.policy._decision.reason in ("refused", "loading")


def test_a_silent_replica_is_one_that_nothing_is_known_of() -> None:
    controller = Controller(min=1, max=3, downscale_delay_s=5)
    controller.target = 2
    assert controller.seconds(200, {A: IDLE, B: None}) == {2}


def test_the_policy_is_asked_once_a_second_however_often_serve_asks() -> None:
    controller = Controller(min=1, max=3)
    controller.seconds(1, {A: IDLE})
    looks = len(controller.board.shown)
    for _ in range(50):
        assert controller.state.get_decision_num_replicas(1) == 1
    assert len(controller.board.shown) == looks


def test_an_error_leaves_the_number_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(min=1, max=3)
    controller.target = 2
    monkeypatch.setattr(controller.policy._policy, "decide", lambda *_: 1 / 0)
    assert controller.seconds(5, {A: IDLE, B: IDLE}) == {2}
    assert caplog.text.count("autoscaling of Target failed") == 1


def test_freshness_goes_by_the_controllers_own_clock() -> None:
    """The replica's clock may show anything, and may jump."""
    reports = LatestReports()

    def update(now_s: float, at_s: float | None) -> Report | None:
        metrics = {} if at_s is None else {name: {A: said} for name, said in series(IDLE, at_s=at_s).items()}
        return reports.update(["a"], metrics, now_s)["a"]

    assert update(0, 5_000_000.0) == IDLE
    assert update(REPORT_LASTS_S - 1, 5_000_000.0) == IDLE
    assert update(REPORT_LASTS_S, 5_000_000.0) is None, "the same as before"
    assert update(REPORT_LASTS_S + 1, 17.0) == IDLE, "another time is a new report"
    assert update(REPORT_LASTS_S + 2, None) is None


def test_a_report_that_lacks_something_is_none() -> None:
    metrics = {name: {A: said} for name, said in series(IDLE, at_s=1.0).items()}
    del metrics["seats"]
    assert LatestReports().update(["a", "b"], metrics, 0) == {"a": None, "b": None}


def test_another_serve_is_refused_by_the_name_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray.serve._private.autoscaling_state._resolve_policy_callable")
    with pytest.raises(ConfigError, match="_resolve_policy_callable does not exist"):
        TargetScaling("app", {"max": 2})
    assert leans_on.CONTROLLER in leans_on.TABLES


def test_reports_are_told_as_often_as_they_are_looked_at() -> None:
    config = serve_autoscaling(AutoscalingConfig(min=2, max=4), "app")
    assert isinstance(config, ServeAutoscaling)
    assert config.metrics_interval_s <= autoscaling.LOOK_EVERY_S
    assert (config.min_replicas, config.max_replicas) == (2, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0), "the policy has delays of its own"
