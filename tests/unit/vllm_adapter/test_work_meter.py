"""Tokens a second of an engine, and the size of its requests."""

from __future__ import annotations

import pytest

from outrider.actors.vllm_adapter.work_meter import HALF_LIFE_S, WINDOW_S, WorkMeter
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def work(meter: WorkMeter, clock: Clock, seconds: float, tokens_a_step: int, step_s: float = 0.1) -> None:
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        meter.stepped(tokens_a_step, (), busy=True)


def test_what_is_done_a_second_is_measured_while_there_is_work(clock: Clock) -> None:
    meter = WorkMeter(clock)
    assert meter.tokens_per_s == 0
    work(meter, clock, 20, 40)
    assert meter.tokens_per_s == pytest.approx(400, rel=0.1)
    meter.stepped(0, (), busy=False)
    clock.now += 100_000
    assert meter.tokens_per_s == pytest.approx(400, rel=0.1), "a night without work says nothing about the rate"


def test_a_moment_is_not_measured(clock: Clock) -> None:
    meter = WorkMeter(clock)
    work(meter, clock, 0.5, 4000)
    meter.stepped(4000, (), busy=False)
    assert meter.tokens_per_s == 0


def test_a_batch_that_is_not_full_does_not_lower_the_rate_at_once(clock: Clock) -> None:
    meter = WorkMeter(clock)
    work(meter, clock, 20, 100)
    work(meter, clock, 30, 10)
    assert meter.tokens_per_s > 900
    work(meter, clock, 3 * HALF_LIFE_S, 10)
    assert meter.tokens_per_s < 300


def test_a_rate_counts_from_where_work_began(clock: Clock) -> None:
    """What was not done before there was anything to do is no lack of speed."""
    meter = WorkMeter(clock)
    work(meter, clock, 1, 0)
    meter.stepped(0, (), busy=False)
    clock.now += WINDOW_S / 2
    work(meter, clock, 3, 100)
    assert meter.tokens_per_s == pytest.approx(1000, rel=0.1)


def test_the_size_of_requests_follows_those_that_end(clock: Clock) -> None:
    meter = WorkMeter(clock)
    assert meter.request_tokens == 512
    assert meter.expected_tokens(100, None) == 356
    assert meter.expected_tokens(100, 10) == 110
    for _ in range(200):
        meter.stepped(1, [(1000, 20)], busy=True)
    assert meter.request_tokens == pytest.approx(1020, rel=0.01)
    assert meter.expected_tokens(100, 1024) == pytest.approx(120, rel=0.01)
