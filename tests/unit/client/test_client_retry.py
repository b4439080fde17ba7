"""Which failures are tried again, and when."""

from __future__ import annotations

import grpc
import pytest

from deploy.client.attempts import FIRST_DELAY_S, LONGEST_DELAY_S, RetryPolicy
from deploy.client.error import OutriderError

UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


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
