"""How many drafters a pool should have, on simulated targets."""

from __future__ import annotations

import pytest

from outrider.actors.serving.pool_scaling import FIRST_AFTER_S, TRIAL_S, PoolLook, PoolPolicy
from outrider.cluster.membership import Work
from outrider.cluster.scaling_config import PoolScalingConfig

IDLE = Work()
GOOD, POOR, UNKNOWN = Work(1, 60.0, 40.0), Work(1, 41.0, 40.0), Work(1)
UP_S, DOWN_S, PROBE_S = 5.0, 60.0, 600.0
A_QUARTER = 0.25
"""Of a target's accelerators: a drafter has to gain 10 tokens a second where a target does 40."""


class Pool:
    """Looks once a second. Drafters are loaded load_s after they were asked for."""

    def __init__(self, load_s: float = 20.0, wanted: int = 1, **settings: object) -> None:
        times = {"upscale_delay_s": UP_S, "downscale_delay_s": DOWN_S, "probe_s": PROBE_S}
        self.policy = PoolPolicy(PoolScalingConfig(**{"max": 4, **times, **settings}), A_QUARTER)
        self.now, self.wanted, self.reason = 0.0, wanted, ""
        self._load_s, self._loaded = load_s, [0.0] * wanted

    def run(self, seconds: float, *work: Work) -> list[int]:
        """The numbers that there were to be, one after the other."""
        seen = [self.wanted]
        for _ in range(int(seconds)):
            self.now += 1.0
            running = sum(at <= self.now for at in self._loaded[: self.wanted])
            decision = self.policy.decide(PoolLook(self.now, self.wanted, running, list(work)))
            self.reason = decision.reason
            while len(self._loaded) < decision.replicas:
                self._loaded.append(self.now + self._load_s)
            del self._loaded[decision.replicas :]
            if decision.replicas != self.wanted:
                seen.append(decision.replicas)
            self.wanted = decision.replicas
        return seen


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (4, 1), (5, 2), (16, 4), (40, 4)])
def test_as_many_as_the_targets_at_work_take(targets: int, drafters: int) -> None:
    pool = Pool()
    pool.run(30, *[GOOD] * targets, IDLE, IDLE)
    assert (pool.wanted, pool.reason) == (drafters, "targets")


def test_no_more_than_pay() -> None:
    pool = Pool(targets_per_drafter=1)
    pool.run(300, *[Work(1, 45.0, 40.0)] * 4)
    assert (pool.wanted, pool.reason) == (2, "gain"), "20 tokens a second are gained, and each costs 10"


def test_it_is_started_at_once_and_taken_away_slowly_and_one_by_one() -> None:
    pool = Pool()
    assert pool.run(UP_S, *[GOOD] * 16) == [1]
    assert pool.run(1, *[GOOD] * 16) == [1, 4]
    assert pool.run(DOWN_S, *[GOOD] * 4) == [4]
    assert pool.run(1, *[GOOD] * 4) == [4, 3]
    assert pool.run(DOWN_S, *[GOOD] * 4) == [3, 2]
    assert pool.run(10 * DOWN_S, *[GOOD] * 4) == [2, 1]


def test_without_work_there_is_none_and_with_work_there_is() -> None:
    pool = Pool()
    assert pool.run(2 * DOWN_S, IDLE, IDLE) == [1, 0]
    assert pool.reason == "idle"
    assert pool.run(2 * UP_S, GOOD, IDLE) == [0, 1]


def test_short_answers_bring_the_first_one_and_seldom_ones_do_not() -> None:
    pool = Pool(wanted=0)
    short = [(2, GOOD), (DOWN_S / 2, IDLE)]
    assert max(max(pool.run(*each)) for _ in range(2) for each in short) == 1
    assert pool.run(4, *[GOOD] * 5) == [1]
    pool.run(2, GOOD)
    assert pool.run(4, *[GOOD] * 5) == [1], "a second one is called for without a break"
    seldom = Pool(wanted=0)
    assert all(seldom.run(*each) == [0] for _ in range(10) for each in ((2, GOOD), (DOWN_S, IDLE)))


def test_a_pause_is_no_reason_to_go() -> None:
    pool = Pool()
    for _ in range(20):
        assert pool.run(DOWN_S / 2, IDLE) == [1]
        assert pool.run(2, GOOD) == [1]


def test_one_that_does_not_pay_goes_and_is_tried_again_now_and_then() -> None:
    pool = Pool(load_s=30.0)
    assert pool.run(DOWN_S + 2, POOR) == [1, 0]
    assert pool.reason == "gain"
    assert pool.run(PROBE_S - 10, POOR) == [0]
    assert pool.run(20, POOR) == [0, 1]
    assert pool.reason == "probe"
    kept_s = 0
    while pool.run(1, POOR) == [1]:
        kept_s += 1
    whole_s = 30 + TRIAL_S + DOWN_S
    assert whole_s - 20 <= kept_s <= whole_s, "loaded, which began in the 20 s before, tried, and one delay"
    assert pool.run(PROBE_S - 10, POOR) == [0], "rarely"


def test_requests_that_come_in_bursts_are_tried_too() -> None:
    """A pause tells nothing of what a drafter gains, and ends no trial of one that loads."""
    pool = Pool(load_s=30.0)
    assert pool.run(DOWN_S + 2, POOR) == [1, 0]
    burst = [(8, POOR), (2, IDLE)]
    seen = [pool.run(*each) for _ in range(int(PROBE_S // 10) - 1) for each in burst]
    assert max(map(max, seen)) == 0
    for each in burst * 6:
        pool.run(*each)
    pool.run(2, IDLE)
    pool.run(2, POOR)
    assert (pool.wanted, pool.reason) == (1, "probe")


def test_a_trial_that_pays_is_none_any_more() -> None:
    pool = Pool()
    pool.run(DOWN_S + 2, POOR)
    pool.run(PROBE_S + 20, POOR)
    assert (pool.wanted, pool.reason) == (1, "probe")
    assert pool.run(10 * DOWN_S, GOOD) == [1]
    assert pool.reason == "targets"


def test_who_decodes_nothing_plainly_yet_is_given_a_drafter() -> None:
    pool = Pool(wanted=0)
    assert pool.run(2 * UP_S, UNKNOWN) == [0, 1]


def test_where_a_drafter_costs_nothing_any_gain_will_do() -> None:
    pool = Pool(worth=0)
    assert pool.run(3 * DOWN_S, POOR) == [1]
    assert pool.run(3 * DOWN_S, Work(1, 40.0, 40.0)) == [1, 0]


def test_the_least_and_the_most_hold_whatever_is_gained() -> None:
    pool = Pool(min=2, wanted=2)
    assert pool.run(3 * DOWN_S, POOR) == [2]
    assert pool.run(3 * DOWN_S, IDLE) == [2]
    assert pool.run(30, *[GOOD] * 100) == [2, 4]
    pool.wanted = 7
    assert pool.run(1, GOOD) == [7, 4]
    assert pool.reason == "bounds"


def test_what_nobody_has_said_lately_changes_nothing() -> None:
    pool = Pool()
    pool.run(1, IDLE)
    for wanted in (0, 1, 3):
        for now in range(1000):
            decision = pool.policy.decide(PoolLook(float(now), wanted, wanted, None))
            assert (decision.replicas, decision.reason) == (wanted, "no_data")


def test_a_new_pool_has_a_drafter_load_beside_its_targets() -> None:
    policy = PoolPolicy(PoolScalingConfig(max=4), A_QUARTER)
    looks = [policy.decide(PoolLook(now, 0, 0, None)).replicas for now in (0.0, FIRST_AFTER_S - 1, FIRST_AFTER_S)]
    assert looks == [0, 0, 1]
    assert policy.decide(PoolLook(FIRST_AFTER_S, 0, 0, None), most=0).replicas == 0, "Serve's target capacity"
