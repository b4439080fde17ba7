"""How many replicas: the policy on simulated load, where a second costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.actors.serving.autoscaling import LONGEST_LOAD_S, Decision, Look, Report, ScalingPolicy
from outrider.cluster.scaling_config import REASONS, AutoscalingConfig
from tests.scaling_cluster import BUSY, IDLE, RATE, SEATS, TOKENS, Cluster, steady


def settings(**changes: float) -> AutoscalingConfig:
    return AutoscalingConfig(**{"min": 1, "max": 8, "downscale_delay_s": 60.0, **changes})


def waiting(seconds: float, like: Report = BUSY) -> Report:
    """A replica that has work for so long beyond what it works on."""
    tokens = seconds * RATE
    return replace(like, waiting=tokens / TOKENS, waiting_tokens=tokens)


def look(now_s: float, *reports: Report | None, wanted: int | None = None, queued: float = 0, refused: int | None = 0):
    named = {f"replica{number}": report for number, report in enumerate(reports)}
    return Look(now_s, len(reports) if wanted is None else wanted, named, queued, refused)


def decisions(policy: ScalingPolicy, seconds: int, of: Callable[[float], Look], start_s: int = 0) -> list[Decision]:
    return [policy.decide(of(start_s + second)) for second in range(seconds)]


def numbers(found: list[Decision]) -> set[int]:
    return {decision.replicas for decision in found}


def test_a_load_that_one_replica_does_leaves_one() -> None:
    cluster = Cluster(ScalingPolicy(settings()))
    cluster.run(600, steady(1.8))
    assert set(cluster.history) == {1}
    assert cluster.reasons == {"steady"}


@pytest.mark.parametrize("replicas", [2, 4, 7])
def test_a_jump_in_load_is_met_at_once_and_not_far_overshot(replicas: int) -> None:
    cluster = Cluster(ScalingPolicy(settings(max=16)), load_s=30)
    a_second = (replicas - 0.2) * RATE / TOKENS
    cluster.run(10, steady(a_second))
    assert replicas - 1 <= cluster.wanted <= replicas + 2, "what is missing is called for in one step"
    cluster.run(290, steady(a_second))
    assert replicas <= max(cluster.history) <= 2 * replicas
    assert cluster.requests < SEATS * cluster.running + 5, "what had piled up has been worked off"
    assert "queue" in cluster.reasons


def test_what_piles_up_while_replicas_load_calls_for_no_more() -> None:
    """Serve would start one after the other for as long as the first ones load."""
    cluster = Cluster(ScalingPolicy(settings(max=16)), load_s=10_000)
    cluster.run(20, steady(5.5))
    called_for = cluster.wanted
    cluster.run(600, steady(5.5))
    assert called_for >= 2
    assert cluster.wanted <= called_for + 1


def test_a_node_that_was_waited_for_for_hours_makes_the_next_crowd_no_slower_to_meet() -> None:
    policy = ScalingPolicy(settings(max=32, upscale_delay_s=0))
    hours_s = 6 * 3600
    for now_s in range(0, hours_s, 10):
        policy.decide(look(float(now_s), IDLE, wanted=2))
    decision = policy.decide(look(float(hours_s), waiting(2000), waiting(2000)))
    assert decision == Decision(2 + math.ceil(2 * 2000 / (5 + LONGEST_LOAD_S)), "queue")


def test_more_load_while_replicas_load_calls_for_more() -> None:
    cluster = Cluster(ScalingPolicy(settings(max=16)), load_s=120)
    cluster.run(20, steady(3.5))
    called_for = cluster.wanted
    cluster.run(20, steady(15))
    assert cluster.wanted >= called_for + 3


def test_refusals_call_for_more_though_no_rate_is_known_yet() -> None:
    policy = ScalingPolicy(settings())
    new = replace(BUSY, tokens_per_s=0.0)
    found = decisions(policy, 6, lambda now_s: look(now_s, new, refused=3))
    assert found[-1] == Decision(2, "refused")


def test_a_burst_of_refusals_that_is_over_calls_for_nothing() -> None:
    policy = ScalingPolicy(settings())
    assert numbers(decisions(policy, 60, lambda now_s: look(now_s, BUSY, refused=200 if now_s == 3 else 0))) == {1}


def test_what_gates_refuse_counts_like_what_waits() -> None:
    """Full gates keep the queue as short as it is; only they know how much more there would be."""
    few, many = (
        decisions(
            ScalingPolicy(settings(max=32)),
            6,
            lambda now_s, refused=refused: look(now_s, waiting(20), queued=256, refused=refused),
        )[-1]
        for refused in (0, 20)
    )
    assert many.replicas >= few.replicas + 8


def test_a_spike_shorter_than_the_delay_changes_nothing() -> None:
    cluster = Cluster(ScalingPolicy(settings(upscale_delay_s=10)))
    cluster.run(300, lambda now_s: 15 if now_s % 60 < 2 else 0)
    assert set(cluster.history) == {1}


def test_one_look_in_the_delay_does_not_decide_how_many_are_started() -> None:
    def started(queues_s: list[float]) -> int:
        policy = ScalingPolicy(settings(upscale_delay_s=4, max=32))
        found = [policy.decide(look(now_s, waiting(queue_s))) for now_s, queue_s in enumerate(queues_s)]
        return found[-1].replicas

    assert started([6, 6, 6, 6, 500]) == started([6, 6, 6, 6, 6]) == 2
    assert started([500, 500, 500, 500, 500]) >= 8


def test_one_at_a_time_goes_and_not_before_the_delay() -> None:
    policy = ScalingPolicy(settings(downscale_delay_s=60))
    wanted, changes = 4, []
    for now_s in range(400):
        decision = policy.decide(look(now_s, *[IDLE] * wanted))
        if decision.replicas != wanted:
            changes.append((now_s, decision))
            wanted = decision.replicas
    assert [(now_s, decision.replicas) for now_s, decision in changes] == [(60, 3), (120, 2), (180, 1)]
    assert {decision.reason for _, decision in changes} == {"idle"}


@pytest.mark.parametrize(
    "interruption",
    [
        {"refused": 1},
        {"queued": 3},
        {"refused": None},
        {"reports": [BUSY, BUSY]},
        {"reports": [IDLE, None]},
        {"reports": [IDLE], "wanted": 2},
        {"reports": [waiting(4, IDLE), IDLE]},
        {"reports": [replace(IDLE, kv_cache_usage=0.8), IDLE]},
    ],
    ids=["refused", "queued", "callers silent", "busy", "one silent", "one away", "waits", "kv"],
)
def test_whatever_speaks_against_one_less_starts_the_delay_anew(interruption: dict) -> None:
    policy = ScalingPolicy(settings(downscale_delay_s=60, upscale_delay_s=5))
    idle = lambda now_s: look(now_s, IDLE, IDLE)  # noqa: E731
    assert numbers(decisions(policy, 59, idle)) == {2}
    reports = interruption.pop("reports", [IDLE, IDLE])
    assert policy.decide(look(59, *reports, **interruption)).replicas == 2
    assert numbers(decisions(policy, 60, idle, start_s=60)) == {2}
    # A refusal speaks against it for as long as it counts.
    assert 1 in numbers(decisions(policy, 15, idle, start_s=120))


def test_between_the_thresholds_nothing_changes() -> None:
    """What is too little for one less is not enough for one more."""
    policy = ScalingPolicy(settings(downscale_delay_s=10, upscale_delay_s=0))
    for queue_s in (2.6, 4.0, 4.9):
        found = decisions(policy, 100, lambda now_s, queue_s=queue_s: look(now_s, waiting(queue_s), waiting(queue_s)))
        assert numbers(found) == {2}


def test_a_load_that_swings_does_not_move_replicas_with_every_swing() -> None:
    cluster = Cluster(ScalingPolicy(settings(downscale_delay_s=300)), load_s=30)
    cluster.run(3600, lambda now_s: 5.0 if now_s % 120 < 60 else 0.5)
    changes = [b - a for a, b in zip(cluster.history, cluster.history[1:], strict=False) if a != b]
    assert sum(change > 0 for change in changes) <= 3
    assert sum(change < 0 for change in changes) <= 3
    assert not cluster.refused


def test_a_ramp_up_and_down_is_followed_without_refusing_anything() -> None:
    cluster = Cluster(ScalingPolicy(settings(downscale_delay_s=30)), load_s=20)
    cluster.run(1200, lambda now_s: max(0.2, 10 * (1 - abs(now_s - 600) / 600)))
    assert max(cluster.history) >= 5
    assert not cluster.refused
    cluster.run(400, steady(0.2))
    assert cluster.wanted == 1


def test_nothing_is_decided_on_nothing() -> None:
    policy = ScalingPolicy(settings(upscale_delay_s=0, downscale_delay_s=0))
    silent = decisions(policy, 50, lambda now_s: look(now_s, None, None, wanted=2, queued=500, refused=50))
    assert set(silent) == {Decision(2, "no_data")}
    loading = decisions(policy, 50, lambda now_s: look(now_s, wanted=3, queued=500, refused=50), start_s=50)
    assert set(loading) == {Decision(3, "loading")}


def test_one_silent_replica_stops_going_down_and_not_going_up() -> None:
    policy = ScalingPolicy(settings(upscale_delay_s=2, downscale_delay_s=0))
    assert numbers(decisions(policy, 50, lambda now_s: look(now_s, IDLE, None))) == {2}
    up = decisions(policy, 10, lambda now_s: look(now_s, waiting(5 + 2 * now_s), None), start_s=50)
    assert max(numbers(up)) >= 3


def test_a_replica_that_comes_and_goes_moves_nothing() -> None:
    policy = ScalingPolicy(settings(upscale_delay_s=3, downscale_delay_s=30))
    found = decisions(policy, 600, lambda now_s: look(now_s, *([IDLE, IDLE] if now_s % 20 < 15 else [IDLE]), wanted=2))
    assert numbers(found) == {2}


def test_full_kv_caches_call_for_more_only_while_requests_wait() -> None:
    full = replace(BUSY, running=8, kv_cache_usage=0.97)
    assert numbers(decisions(ScalingPolicy(settings()), 60, lambda now_s: look(now_s, full, full))) == {2}
    held_up = replace(full, waiting=1, waiting_tokens=TOKENS)
    found = decisions(ScalingPolicy(settings()), 60, lambda now_s: look(now_s, held_up, held_up))
    assert Decision(3, "kv") in found


def test_long_steps_call_for_more_until_there_is_nothing_left_to_part() -> None:
    policy = ScalingPolicy(settings(target_round_ms=40))
    slow = replace(BUSY, running=6, step_ms=100.0)
    assert decisions(policy, 6, lambda now_s: look(now_s, slow))[-1] == Decision(3, "round")
    policy = ScalingPolicy(settings(target_round_ms=40))
    alone = replace(BUSY, running=1, step_ms=100.0)
    assert numbers(decisions(policy, 60, lambda now_s: look(now_s, alone, alone))) == {2}
    unset = ScalingPolicy(settings())
    assert numbers(decisions(unset, 60, lambda now_s: look(now_s, slow))) == {1}


def test_one_less_would_make_steps_too_long() -> None:
    policy = ScalingPolicy(settings(target_round_ms=40, downscale_delay_s=5))
    close = replace(BUSY, running=4, step_ms=30.0, kv_cache_usage=0.2)
    assert numbers(decisions(policy, 60, lambda now_s: look(now_s, close, close))) == {2}
    short = replace(close, step_ms=15.0)
    assert 1 in numbers(decisions(policy, 60, lambda now_s: look(now_s, short, short), start_s=60))


def test_limits_hold_at_once() -> None:
    policy = ScalingPolicy(settings(min=2, max=3))
    assert policy.decide(look(0, IDLE)) == Decision(2, "bounds")
    assert policy.decide(look(1, *[BUSY] * 5)) == Decision(3, "bounds")
    assert policy.decide(look(2, IDLE, IDLE), least=1, most=1) == Decision(1, "bounds")
    found = decisions(policy, 60, lambda now_s: look(now_s, *[waiting(60)] * 3, refused=9), start_s=3)
    assert set(found) == {Decision(3, "queue")}, "there are no more, and it is told why there should be"


def test_a_replica_that_is_still_being_taken_away_calls_for_nothing() -> None:
    policy = ScalingPolicy(settings(upscale_delay_s=0, downscale_delay_s=0))
    assert numbers(decisions(policy, 30, lambda now_s: look(now_s, IDLE, IDLE, BUSY, wanted=2))) == {2}


def test_every_reason_is_a_listed_one() -> None:
    cluster = Cluster(ScalingPolicy(settings(target_round_ms=40)), load_s=20)
    cluster.run(900, lambda now_s: 6 if now_s < 300 else 0.1)
    assert cluster.reasons <= set(REASONS)
    assert {"queue", "loading", "idle"} <= cluster.reasons


def test_a_report_is_all_there_or_none() -> None:
    values = dict.fromkeys(Report.__dataclass_fields__, 1.0)
    assert Report.of({**values, "more": 2.0}) == Report(*[1.0] * len(values))
    del values["seats"]
    assert Report.of(values) is None
