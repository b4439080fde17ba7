"""The adapter between Serve's controller and the pool's policy, called as Serve's own autoscaling state calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig

from outrider.actors.serve_seam import pool_scaling
from outrider.actors.serve_seam.pool_scaling import (
    LOST_S,
    SAID_LATELY_S,
    PoolScaling,
    RegistryCalls,
    serve_pool_autoscaling,
)
from outrider.actors.serving.pool_scaling import FIRST_AFTER_S
from outrider.cluster.membership import Verifier, Work
from outrider.cluster.registry import Registry
from outrider.cluster.scaling_config import PoolScalingConfig
from tests.clock import Clock

DEPLOYMENT = DeploymentID("DrafterPool", "app")
IDLE, GOOD = Work(), Work(1, 60.0, 40.0)


class Said:
    """In place of the calls to the registry."""

    work_now: list[Work] | None = None

    def work(self, now_s: float) -> list[Work] | None:
        return self.work_now


class Controller:
    """Serve's own state of the pool's deployment. Calls every second; what is wanted runs."""

    def __init__(self, **settings: float) -> None:
        self.settings, self.target = settings, -1  # of a deployment that Serve does not know yet
        self.said, self.clock = Said(), Clock(100.0)
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        self.deploy()

    def deploy(self) -> None:
        """Of another configuration than before."""
        config = serve_pool_autoscaling(PoolScalingConfig(**self.settings), 0.25, "app")
        info = SimpleNamespace(
            deployment_config=DeploymentConfig(autoscaling_config=config),
            target_capacity=None,
            target_capacity_direction=None,
            config_changed=lambda other: True,
        )
        self.target = self.state.register(info, self.target)
        policy: PoolScaling = self.state._policy.__wrapped__  # out of a pickle, as in the controller
        policy._registry, policy._clock = self.said, self.clock  # type: ignore[assignment]

    def seconds(self, number: int, work: list[Work] | None) -> int:
        self.said.work_now = work
        for _ in range(number):
            self.clock.now += 1
            self.state.update_running_replica_ids([ReplicaID(str(n), DEPLOYMENT) for n in range(self.target)])
            self.target = self.state.get_decision_num_replicas(self.target)
        return self.target


def test_a_pool_begins_with_one_follows_the_work_and_goes_down_to_none() -> None:
    controller = Controller(max=3, targets_per_drafter=2, upscale_delay_s=3, downscale_delay_s=20)
    assert controller.seconds(int(FIRST_AFTER_S) + 2, None) == 1, "one loads beside the targets"
    assert controller.seconds(10, [GOOD] * 6) == 3
    assert controller.seconds(15, [IDLE] * 6) == 3
    assert controller.seconds(100, [IDLE] * 6) == 0
    assert controller.seconds(10, [GOOD, IDLE]) == 1
    assert controller.seconds(100, None) == 1, "nobody has said anything"


def test_a_deploy_goes_on_with_as_many_as_there_are() -> None:
    for number, work in ((4, [GOOD] * 8), (0, [IDLE] * 8)):
        controller = Controller(max=4, targets_per_drafter=2, upscale_delay_s=3, downscale_delay_s=10)
        assert controller.seconds(100, work) == number
        controller.deploy()
        assert controller.target == number
        assert controller.seconds(5, None) == number, "the registry has not answered the new policy yet"
        assert controller.seconds(100, work) == number


def test_a_policy_that_fails_leaves_the_number_alone(caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(min=1, max=3)
    policy = controller.state._policy.__wrapped__
    policy._registry = None
    assert controller.seconds(30, [IDLE]) == 1
    assert caplog.text.count("autoscaling of DrafterPool failed") == 1


class Answers:
    """A registry's handle, and Ray's functions for what it answers: its answers come when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.there: list[Any] = []
        self.lost, self.looked_up = False, 0
        self.work = SimpleNamespace(remote=self._ask)
        monkeypatch.setattr(pool_scaling.ray, "get_actor", self._find)
        monkeypatch.setattr(pool_scaling.ray, "wait", lambda refs, timeout: (self.there, []))
        monkeypatch.setattr(pool_scaling.ray, "get", self._get)

    def _find(self, name: str, namespace: str) -> Any:
        self.looked_up += 1
        if self.lost:
            raise ValueError("no such actor")
        return self

    def _ask(self) -> int:
        self.asked.append(len(self.asked))
        return len(self.asked)

    def _get(self, ref: Any) -> list[Work]:
        answer = self.there.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_controller_waits_for_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = Answers(monkeypatch), RegistryCalls("app")
    assert [calls.work(float(now)) for now in range(5)] == [None] * 5
    assert len(answers.asked) == 1, "one question at a time"
    answers.there.append([GOOD])
    assert calls.work(10.0) == [GOOD]
    assert len(answers.asked) == 2
    assert answers.looked_up == 1, "Ray's GCS is waited for then"
    assert calls.work(10.0 + SAID_LATELY_S - 1) == [GOOD]
    assert calls.work(10.0 + SAID_LATELY_S) is None


def test_a_registry_that_is_lost_is_asked_when_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = Answers(monkeypatch), RegistryCalls("app")
    calls.work(0.0)
    answers.lost = True
    answers.there.append(RayActorError())
    assert calls.work(1.0) is None
    answers.lost = False
    calls.work(2.0)
    answers.there.append([IDLE])
    assert calls.work(3.0) == [IDLE]
    assert answers.looked_up == 2


def test_a_question_that_is_lost_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = Answers(monkeypatch), RegistryCalls("app")
    for now, questions in ((0.0, 1), (LOST_S - 1, 1), (LOST_S, 2), (2 * LOST_S - 1, 2)):
        assert calls.work(now) is None
        assert len(answers.asked) == questions
    answers.there.append([GOOD])
    assert calls.work(2 * LOST_S) == [GOOD]


async def test_a_registry_that_no_target_has_asked_says_nothing_of_their_work() -> None:
    """They load, or it was made anew: that is no reason to take a drafter away."""
    registry = Registry()
    assert await registry.work() is None
    await registry.assigned_to(Verifier("r1", linked_to="D1", work=GOOD))
    assert await registry.work() == [GOOD]
