"""How many target replicas there are to be: through Serve's own autoscaling state, on simulated load."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.actors.serve_adapter.autoscaling import LASTS_S, serve_autoscaling
from outrider.actors.serving.autoscaling import Report
from outrider.cluster.config import AutoscalingConfig
from tests.support.cluster.scaling_cluster import BUSY, IDLE, RATE, SEATS, TOKENS, Cluster, Controller, steady, waiting

HELD_UP = replace(BUSY, running=8, kv_cache_usage=0.97, waiting=1, waiting_tokens=TOKENS)


def controller(target: int = 1, **settings: float) -> Controller:
    given = {"max": 8, "downscale_delay_s": 60.0, **settings}
    return Controller(serve_autoscaling(AutoscalingConfig(**given)), target)


def test_a_load_that_one_replica_does_leaves_one() -> None:
    cluster = Cluster({"max": 8})
    cluster.run(600, steady(1.8))
    assert set(cluster.history) == {1}
    assert cluster.reasons == {"steady"}


@pytest.mark.parametrize("replicas", [2, 4, 7])
def test_a_jump_in_load_is_met_at_once_and_not_far_overshot(replicas: int) -> None:
    cluster = Cluster({"max": 16}, load_s=30)
    a_second = (replicas - 0.2) * RATE / TOKENS
    cluster.run(15, steady(a_second))
    assert replicas - 1 <= cluster.history[-1] <= replicas + 2, "what is missing is started in one step"
    cluster.run(600, steady(a_second))
    assert replicas <= max(cluster.history) <= 2 * replicas
    assert cluster.requests < SEATS * cluster.running + 5, "what had piled up has been worked off"
    assert "queue" in cluster.reasons


def test_what_piles_up_while_replicas_load_starts_no_others_and_more_load_does() -> None:
    cluster = Cluster({"max": 32}, load_s=10_000, queue=10**6)
    cluster.run(20, steady(5.5))
    started = cluster.history[-1]
    cluster.run(600, steady(5.5))
    assert 2 <= started <= cluster.history[-1] <= started + 1
    cluster.run(30, steady(15))
    assert cluster.history[-1] >= started + 3


def test_a_load_that_swings_or_comes_in_spikes_does_not_move_replicas_each_time() -> None:
    cluster = Cluster({"max": 8}, load_s=30)
    cluster.run(1200, lambda now_s: 5.0 if now_s % 120 < 60 else 0.5)
    changes = [b - a for a, b in pairwise(cluster.history) if a != b]
    assert max(sum(change > 0 for change in changes), sum(change < 0 for change in changes)) <= 3
    cluster = Cluster({"max": 8})
    cluster.run(300, lambda now_s: 20 if now_s % 60 < 2 else 0)
    assert set(cluster.history) == {1}


def test_one_at_a_time_goes_and_not_before_the_delay() -> None:
    scaled = controller(4)
    found = [scaled.seconds(1, *[IDLE] * scaled.target)[0] for _ in range(200)]
    assert [second for second, (a, b) in enumerate(pairwise(found)) if a != b] == [59, 120, 181]
    assert found[-1] == 1
    scaled.seconds(1, IDLE)
    assert scaled.reason == "steady", "there must be one"


@pytest.mark.parametrize(
    ("reports", "queued"),
    [
        ([IDLE, IDLE], 3),
        ([replace(IDLE, running=8)] * 2, 0),
        ([IDLE, None], 0),
        ([IDLE], 0),
        ([waiting(4, IDLE), IDLE], 0),
        ([replace(IDLE, kv_cache_usage=0.8), IDLE], 0),
    ],
    ids=["queued", "busy", "one silent", "one away", "waits", "kv"],
)
def test_whatever_speaks_against_one_less_starts_the_delay_anew(reports: list[Report | None], queued: float) -> None:
    scaled = controller(2)
    assert set(scaled.seconds(40, IDLE, IDLE)) == {2}
    assert set(scaled.seconds(int(LASTS_S) + 2, *reports, queued=queued)) == {2}
    assert set(scaled.seconds(40, IDLE, IDLE)) == {2}
    assert 1 in scaled.seconds(40, IDLE, IDLE)


def test_what_does_not_report_is_not_taken_away_and_holds_nothing_up() -> None:
    scaled = controller(2, downscale_delay_s=0)
    assert set(scaled.seconds(50, None, None, queued=500)) == {2}
    assert scaled.reason == "no_data"
    assert set(scaled.seconds(50)) == {2}
    assert scaled.reason == "loading"
    assert set(scaled.seconds(50, IDLE, None)) == {2}
    assert scaled.reason == "no_data"
    assert max(scaled.seconds(10, waiting(50), None)) >= 3


def test_full_kv_caches_call_for_more_only_while_requests_wait() -> None:
    scaled = controller(2)
    assert set(scaled.seconds(30, *[replace(HELD_UP, waiting=0, waiting_tokens=0)] * 2)) == {2}
    assert scaled.seconds(6, HELD_UP, HELD_UP)[-1] == 3


def test_long_steps_call_for_more_until_there_is_nothing_left_to_part() -> None:
    slow = replace(BUSY, running=6, step_ms=100.0)
    assert controller(1, target_round_ms=40).seconds(6, slow)[-1] == 3
    assert controller(1).seconds(60, slow)[-1] == 1
    alone = replace(BUSY, running=1, step_ms=100.0)
    assert set(controller(2, target_round_ms=40).seconds(60, alone, alone)) == {2}
    close = replace(BUSY, running=4, step_ms=30.0, kv_cache_usage=0.2)
    assert set(controller(2, target_round_ms=40).seconds(100, close, close)) == {2}, "60 ms for one"
    assert 1 in controller(2, target_round_ms=40).seconds(100, *[replace(close, step_ms=15.0)] * 2)


def test_the_limits_hold_and_the_reason_is_told_all_the_same() -> None:
    assert controller(1, min=2).target == 2
    scaled = controller(3, max=3)
    assert set(scaled.seconds(60, *[waiting(60)] * 3)) == {3}
    assert scaled.reason == "queue"
