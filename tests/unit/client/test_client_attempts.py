"""The attempts of one call: which failures are tried again and when, which server is next, what time is left."""

from __future__ import annotations

import grpc
import pytest

from outrider.deploy.client.attempts import (
    FIRST_DELAY_S,
    FIRST_REST_S,
    LOAD_REPORT,
    LONGEST_DELAY_S,
    LONGEST_REST_S,
    REPORT_LIFETIME_S,
    Attempts,
    Balancer,
    RetryPolicy,
    requests_held,
)
from outrider.deploy.client.calls import Call, generate, status
from outrider.deploy.client.error import OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.clock import Clock

UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
LOST = OutriderError(grpc.StatusCode.UNAVAILABLE, "lost", retry_after_s=1.0)


def test_nothing_is_tried_again_unless_asked_for() -> None:
    assert RetryPolicy().delay_s(OutriderError(UNAVAILABLE, "", retry_after_s=1.0), 1, None) is None


@pytest.mark.parametrize(("attempt", "delay_s"), [(1, FIRST_DELAY_S), (2, 2 * FIRST_DELAY_S), (20, LONGEST_DELAY_S)])
def test_without_the_server_s_delay_it_doubles_up_to_a_limit(attempt: int, delay_s: float) -> None:
    assert RetryPolicy(20).delay_s(OutriderError(UNAVAILABLE, ""), attempt, None) == delay_s


@pytest.mark.parametrize("code", [UNAVAILABLE, FULL])
def test_the_server_s_delay_is_taken_as_it_is(code: grpc.StatusCode) -> None:
    assert RetryPolicy(2).delay_s(OutriderError(code, "", retry_after_s=17.5), 2, None) == 17.5


def test_so_many_times_and_no_more() -> None:
    error = OutriderError(UNAVAILABLE, "", retry_after_s=0.0)
    assert [RetryPolicy(2).delay_s(error, attempt, None) for attempt in (1, 2, 3)] == [0.0, 0.0, None]


def test_a_full_queue_is_left_alone_unless_the_server_says_when_to_come_again() -> None:
    assert RetryPolicy(5).delay_s(OutriderError(FULL, ""), 1, None) is None


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code not in (UNAVAILABLE, FULL)])
def test_any_other_failure_stays_one(code: grpc.StatusCode) -> None:
    assert RetryPolicy(5).delay_s(OutriderError(code, "", retry_after_s=0.1), 1, None) is None


def test_no_retry_starts_after_the_call_s_deadline() -> None:
    error = OutriderError(UNAVAILABLE, "", retry_after_s=1.0)
    assert RetryPolicy(5).delay_s(error, 1, 1.5) == 1.0
    assert RetryPolicy(5).delay_s(error, 1, 1.0) is None


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="retries: -1"):
        RetryPolicy(-1)


def test_equal_servers_take_turns() -> None:
    balancer = Balancer(3)
    picks = []
    for _ in range(6):
        picks.append(balancer.pick(0.0))
        balancer.done(picks[-1], 0.0)
    assert picks == [0, 1, 2, 0, 1, 2]


def test_the_one_with_the_fewest_calls_under_way_is_next() -> None:
    balancer = Balancer(2)
    assert [balancer.pick(0.0) for _ in range(4)] == [0, 1, 0, 1]
    balancer.done(1, 0.0)
    balancer.done(1, 0.0)
    assert [balancer.pick(0.0) for _ in range(2)] == [1, 1]


def test_what_others_have_sent_counts_as_long_as_the_report_is_young() -> None:
    balancer = Balancer(2)
    assert balancer.pick(0.0) == 0
    balancer.done(0, 0.0, held=3.0)
    assert balancer.loads(0.0) == [3.0, 0.0]
    assert [balancer.pick(1.0) for _ in range(3)] == [1, 1, 1]
    assert balancer.pick(REPORT_LIFETIME_S) == 0, "an old report says nothing"


def test_own_calls_are_not_counted_twice() -> None:
    balancer = Balancer(1)
    for _ in range(3):
        balancer.pick(0.0)
    balancer.done(0, 0.0, held=2.0)
    assert balancer.loads(0.0) == [2.0]


def test_an_unreachable_server_rests_longer_with_every_failure_until_it_answers() -> None:
    balancer = Balancer(2)

    def fail(now_s: float) -> None:
        while balancer.pick(now_s) != 0:
            balancer.done(1, now_s)
        balancer.done(0, now_s, unreachable=True)

    fail(0.0)
    assert balancer.pick(FIRST_REST_S / 2) == 1
    assert balancer.other_is_up(FIRST_REST_S / 2, avoid={1}) is False
    fail(FIRST_REST_S)
    assert balancer.pick(2.5 * FIRST_REST_S) == 1
    assert balancer.pick(3 * FIRST_REST_S) == 0
    balancer.done(0, 3 * FIRST_REST_S)
    assert balancer.other_is_up(3 * FIRST_REST_S, avoid={1})


def test_a_rest_has_a_limit() -> None:
    balancer = Balancer(1)
    for _ in range(20):
        balancer.pick(0.0)
        balancer.done(0, 0.0, unreachable=True)
    assert balancer.other_is_up(LONGEST_REST_S, avoid=())


def test_when_all_rest_the_one_that_is_over_first_is_asked() -> None:
    balancer = Balancer(2)
    for now_s in (0.0, 0.5):
        balancer.done(balancer.pick(now_s), now_s, unreachable=True)
    assert balancer.pick(0.6) == 0


def test_what_was_tried_is_avoided_while_another_is_up() -> None:
    balancer = Balancer(2)
    balancer.pick(0.0)
    balancer.pick(0.0)
    balancer.pick(0.0)  # the first has two calls, the second one
    assert balancer.pick(0.0, avoid={1}) == 0
    balancer.done(0, 0.0, unreachable=True)
    assert balancer.pick(0.0, avoid={1}) == 1


def test_a_load_report_is_read_from_the_trailing_metadata() -> None:
    report = pb.LoadReport(named_metrics={"num_requests_running": 3, "num_requests_waiting": 2})
    assert requests_held([("x", "y"), (LOAD_REPORT, report.SerializeToString())]) == 5.0


def test_what_is_no_load_report_says_nothing() -> None:
    assert requests_held(None) is None
    assert requests_held([("x", "y")]) is None
    assert requests_held([(LOAD_REPORT, b"\xff\xff")]) is None
    assert requests_held([(LOAD_REPORT, pb.LoadReport(application_utilization=0.5).SerializeToString())]) is None


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def attempts(call: Call, clock: Clock, *, retries: int = 5, balancer: Balancer | None = None) -> Attempts:
    return Attempts(call, RetryPolicy(retries), balancer or Balancer(1), clock)


def test_a_retry_has_what_is_left_of_the_time(clock: Clock) -> None:
    call = generate("hi", {"timeout_s": 10.0})
    trying = attempts(call, clock)
    assert trying.begin() == (0, 10.0)
    assert call.request.timeout_ms == 10_000
    clock.now += 4.0
    assert trying.failed(LOST, None) == 1.0
    clock.now += 1.0
    assert trying.begin() == (0, 5.0)
    assert call.request.timeout_ms == 5_000
    clock.now += 4.5
    assert trying.failed(LOST, None) is None, "half a second is left, and the server wants one"


def test_a_call_without_a_limit_stays_without(clock: Clock) -> None:
    call = generate("hi", {})
    trying = attempts(call, clock)
    trying.begin()
    trying.failed(LOST, None)
    assert trying.begin() == (0, None)
    assert not call.request.HasField("timeout_ms")


def test_a_request_that_carries_no_timeout_is_tried_again_too(clock: Clock) -> None:
    trying = attempts(status(10.0), clock)
    trying.begin()
    assert trying.failed(LOST, None) == 1.0
    assert trying.begin() == (0, 10.0)


def test_another_server_is_asked_at_once(clock: Clock) -> None:
    trying = attempts(generate("hi", {}), clock, balancer=Balancer(2))
    assert trying.begin()[0] == 0
    assert trying.failed(LOST, None) == 0.0
    assert trying.begin()[0] == 1
    assert trying.failed(LOST, None) == 1.0, "both have been tried"


def test_nothing_follows_output(clock: Clock) -> None:
    trying = attempts(generate("hi", {}), clock)
    trying.begin()
    assert trying.failed(LOST, None, final=True) is None


def test_a_call_counts_as_under_way_until_it_is_over_however_it_ends(clock: Clock) -> None:
    balancer = Balancer(1)
    report = [(LOAD_REPORT, pb.LoadReport(named_metrics={"num_requests_running": 3, "num_requests_waiting": 0}))]
    trailing = [(key, value.SerializeToString()) for key, value in report]
    endings = {
        "succeeded": lambda trying: trying.succeeded(None),
        "failed": lambda trying: trying.failed(LOST, None),
        "abandoned": lambda trying: trying.abandoned(),
    }
    for ending, end in endings.items():
        trying = attempts(generate("hi", {}), clock, balancer=balancer)
        trying.begin()
        assert balancer.loads(clock()) == [1.0]
        end(trying)
        trying.abandoned()
        assert balancer.loads(clock()) == [0.0], ending
    trying = attempts(generate("hi", {}), clock, balancer=balancer)
    trying.begin()
    trying.succeeded(trailing)
    assert balancer.loads(clock()) == [3.0], "the server told of three others"
