"""Tests how requests end before their answer does: failures, clients that leave, a full queue, a lost replica."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from tests.integration.ingress.calls import failure, wait_for
from tests.integration.ingress.stand_in_target import HANG_GUARD_S, TARGET_QUEUE, TARGET_SLOTS

pytestmark = pytest.mark.timeout(600)


def test_a_deadline_noticed_by_the_target_is_a_passed_deadline(client: OutriderClient) -> None:
    assert failure(lambda: client.generate("miss the deadline")).code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("script", ["explode later", "end early"])
def test_a_failure_inside_says_which_request_and_nothing_of_the_inside(client: OutriderClient, script: str) -> None:
    error = failure(lambda: list(client.stream(script, request_id="r-boom")))
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == "request r-boom failed inside the server; its log says why"


def test_no_cancellation_is_lost_while_a_message_is_being_written(client: OutriderClient, meeting_point: Path) -> None:
    """Cancelled as soon as the target has made its first message. Left to itself, Serve loses about one in ten."""
    for attempt in range(60):
        request_id = f"r-early-{attempt}"
        with client.stream("hang", request_id=request_id):
            wait_for((meeting_point / f"{request_id}.started").exists)
        wait_for((meeting_point / f"{request_id}.cancelled").exists)


def test_a_full_queue_refuses_at_once_and_admitted_requests_go_on(client: OutriderClient, meeting_point: Path) -> None:
    hanging = []
    for slot in range(TARGET_SLOTS):  # one by one: in a burst, what has not been routed yet counts as queued
        hanging.append(client.stream("hang", request_id=f"r-slot-{slot}"))
        wait_for((meeting_point / f"r-slot-{slot}.started").exists)
    too_many = 3
    with ThreadPoolExecutor(TARGET_QUEUE + too_many) as pool:
        calls = [pool.submit(client.generate, "go", timeout_s=HANG_GUARD_S) for _ in range(TARGET_QUEUE + too_many)]
        wait_for(lambda: sum(call.done() for call in calls) == too_many)
        for slot in hanging:
            slot.close()
        errors = [call.exception() for call in calls if call.exception() is not None]
    assert [error.code for error in errors] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * too_many


def test_an_id_that_is_in_use_is_refused_and_free_again_later(client: OutriderClient, meeting_point: Path) -> None:
    with client.stream("hang", request_id="r-twice") as stream:
        assert next(stream).text_delta == "one "
        error = failure(lambda: client.generate("go", request_id="r-twice"))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert error.message.startswith("request_id: 'r-twice'")
    wait_for((meeting_point / "r-twice.cancelled").exists)
    wait_for(lambda: _is_free(client, "r-twice"))


def _is_free(client: OutriderClient, request_id: str) -> bool:
    try:
        return client.generate("go", request_id=request_id).text == "one three"
    except OutriderError as error:
        if error.code is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        return False


def test_a_lost_replica_is_unavailable_and_its_successor_answers(client: OutriderClient) -> None:
    assert failure(lambda: list(client.stream("die"))).code is grpc.StatusCode.UNAVAILABLE

    def answers() -> bool:
        try:
            return client.generate("go", timeout_s=HANG_GUARD_S / 6).text == "one three"
        except OutriderError as error:
            if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return False

    wait_for(answers)
