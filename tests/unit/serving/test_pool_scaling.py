"""How many drafters a pool is to have: through Serve's own autoscaling state, on simulated targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from outrider.actors.serve_adapter import autoscaling
from outrider.actors.serve_adapter.autoscaling import (
    LASTS_S,
    LOST_S,
    UPSCALE_DELAY_S,
    WorkPoller,
    serve_pool_autoscaling,
)
from outrider.actors.serving.pool_scaling import PROBE_S, TRIAL_S
from outrider.cluster.config import PoolScalingConfig
from outrider.cluster.drafter_registry import Verifier, Work
from outrider.cluster.registry import Registry
from tests.support.cluster.scaling_cluster import Controller

IDLE = Work()
GOOD, POOR, UNKNOWN = Work(1, 60.0, 40.0), Work(1, 41.0, 40.0), Work(1)
UP_S, DOWN_S = int(UPSCALE_DELAY_S), 60
A_QUARTER = 0.25
"""Of a target's accelerators: a drafter has to gain 10 tokens a second where a target does 40."""


class Pool:
    """Drafters are loaded load_s after they were asked for."""

    def __init__(self, load_s: int = 20, wanted: int = 1, **settings: float) -> None:
        given = {"max": 4, "downscale_delay_s": DOWN_S, **settings}
        self.config = serve_pool_autoscaling(PoolScalingConfig(**given), A_QUARTER, "app")
        self.controller, self._load_s, self._loaded = Controller(self.config, wanted), load_s, [0.0] * wanted
        self.deploy()

    def deploy(self) -> None:
        self.controller.register(self.config)
        self.controller.policy.registry = SimpleNamespace(work=lambda now_s: self._work)

    def run(self, seconds: int, *work: Work, silent: bool = False) -> list[int]:
        """Returns the numbers that there were to be, one after the other."""
        self._work = None if silent else list(work)
        seen = [self.controller.target]
        for _ in range(seconds):
            running = sum(at <= self.controller.clock.now for at in self._loaded)
            wanted = self.controller.second({f"d{number}": None for number in range(running)})
            self._loaded += [self.controller.clock.now + self._load_s] * (wanted - len(self._loaded))
            del self._loaded[wanted:]
            seen += [wanted] * (wanted != seen[-1])
        return seen

    @property
    def now(self) -> tuple[int, str]:
        return self.controller.target, self.controller.reason


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (4, 1), (5, 2), (16, 4), (40, 4)])
def test_as_many_as_the_targets_at_work_take(targets: int, drafters: int) -> None:
    pool = Pool()
    pool.run(30, *[GOOD] * targets, IDLE, IDLE)
    assert pool.now == (drafters, "targets")


def test_no_more_than_pay() -> None:
    pool = Pool(targets_per_drafter=1)
    pool.run(300, *[Work(1, 45.0, 40.0)] * 4)
    assert pool.now == (2, "gain"), "20 tokens a second are gained, and each costs 10"


def test_more_are_started_soon_and_taken_away_slowly_and_one_by_one() -> None:
    pool = Pool(load_s=0)
    assert pool.run(UP_S, *[GOOD] * 16) == [1]
    assert pool.run(1, *[GOOD] * 16) == [1, 4]
    assert pool.run(DOWN_S, *[GOOD] * 4) == [4]
    assert pool.run(1, *[GOOD] * 4) == [4, 3]
    assert pool.run(10 * DOWN_S, *[GOOD] * 4) == [3, 2, 1]


def test_without_work_there_is_none_and_with_work_there_is_one_at_once() -> None:
    pool = Pool()
    assert pool.run(2 * DOWN_S, IDLE, IDLE) == [1, 0]
    assert pool.now == (0, "idle")
    assert pool.run(2, GOOD, IDLE) == [0, 1]
    for _ in range(20):
        assert pool.run(DOWN_S // 2, IDLE) == [1], "a pause is no reason to go"
        assert pool.run(2, GOOD) == [1]


def test_one_that_does_not_pay_goes_and_is_tried_again_now_and_then() -> None:
    pool = Pool(load_s=30)
    assert pool.run(DOWN_S + 2, POOR) == [1, 0]
    assert pool.now == (0, "gain")
    assert pool.run(int(PROBE_S) - 10, POOR) == [0]
    assert pool.run(20, POOR) == [0, 1]
    assert pool.now == (1, "probe")
    kept_s = 0
    while pool.run(1, POOR) == [1]:
        kept_s += 1
    whole_s = 30 + TRIAL_S + DOWN_S
    assert whole_s - 20 <= kept_s <= whole_s, "loaded, which began in the 20 s before, tried, and one delay"
    assert pool.run(int(PROBE_S) - 10, POOR) == [0], "rarely"


def test_what_is_not_known_and_what_costs_nothing_gets_a_drafter() -> None:
    assert Pool(wanted=0).run(2, UNKNOWN) == [0, 1]
    pool = Pool(worth=0)
    assert pool.run(3 * DOWN_S, POOR) == [1]
    assert pool.run(3 * DOWN_S, Work(1, 40.0, 40.0)) == [1, 0]


@pytest.mark.parametrize(("number", "work"), [(2, [GOOD] * 8), (0, [IDLE] * 8)])
def test_a_deploy_and_a_silent_registry_change_nothing(number: int, work: list[Work]) -> None:
    pool = Pool()
    pool.run(100, *work)
    assert pool.run(1000, silent=True) == [number]
    pool.deploy()
    assert pool.run(5, silent=True) == [number], "the registry has not answered the new policy yet"
    assert pool.run(100, *work) == [number]


class Answers:
    """A registry's handle, and Ray's functions for what it answers: its answers come when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.looked_up, self.there = 0, 0, list[Any]()
        self.work = SimpleNamespace(remote=self._ask)
        monkeypatch.setattr(autoscaling.ray, "get_actor", self._find)
        monkeypatch.setattr(autoscaling.ray, "wait", lambda refs, timeout: (self.there, []))
        monkeypatch.setattr(autoscaling.ray, "get", self._get)

    def _find(self, name: str, namespace: str) -> Any:
        self.looked_up += 1
        return self

    def _ask(self) -> int:
        self.asked += 1
        return self.asked

    def _get(self, ref: Any) -> list[Work]:
        answer = self.there.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_controller_waits_for_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, calls = Answers(monkeypatch), WorkPoller("app")
    assert [calls.work(float(now)) for now in range(5)] == [None] * 5
    assert answers.asked == 1, "one question at a time"
    answers.there.append([GOOD])
    assert calls.work(10.0) == [GOOD]
    assert (answers.asked, answers.looked_up) == (2, 1)
    assert calls.work(10.0 + LASTS_S - 1) == [GOOD]
    assert calls.work(10.0 + LASTS_S) is None
    calls.work(10.0 + LOST_S)
    assert answers.asked == 3, "a question that is lost is asked once more"
    answers.there.append(RayActorError())
    assert calls.work(11.0 + LOST_S) is None
    calls.work(12.0 + LOST_S)
    assert answers.looked_up == 2, "a lost registry is looked up again"


async def test_a_registry_that_no_target_has_asked_says_nothing_of_their_work() -> None:
    """They load, or it was made anew: that is no reason to take a drafter away."""
    registry = Registry()
    assert await registry.work() is None
    await registry.assigned_to(Verifier("r1", linked_to="D1", work=GOOD))
    assert await registry.work() == [GOOD]
