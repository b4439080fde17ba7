"""The attempts of one call share its time-out and its servers."""

from __future__ import annotations

import grpc
import pytest

from deploy.client.attempts import LOAD_REPORT, Attempts, Balancer, RetryPolicy
from deploy.client.calls import Call, generate, status
from deploy.client.error import OutriderError
from outrider.v1 import generation_pb2 as pb

LOST = OutriderError(grpc.StatusCode.UNAVAILABLE, "lost", retry_after_s=1.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def attempts(call: Call, clock: Clock, *, retries: int = 5, balancer: Balancer | None = None) -> Attempts:
    return Attempts(call, RetryPolicy(retries), balancer or Balancer(1), clock)


def test_a_retry_has_what_is_left_of_the_time(clock: Clock) -> None:
    call = generate("hi", {"timeout_s": 10.0})
    trying = attempts(call, clock)
    assert trying.begin() == (0, 10.0)
    assert call.request.timeout_ms == 10_000
    clock.now_s += 4.0
    assert trying.failed(LOST, None) == 1.0
    clock.now_s += 1.0
    assert trying.begin() == (0, 5.0)
    assert call.request.timeout_ms == 5_000
    clock.now_s += 4.5
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
