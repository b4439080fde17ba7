"""Requests that end before their answer does: deadlines, clients that leave, aborts, a full queue, a lost replica."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.integration.ingress.calls import failure, wait_for
from tests.integration.ingress.stand_in_target import HANG_GUARD_S, TARGET_QUEUE, TARGET_SLOTS

pytestmark = pytest.mark.timeout(600)


def test_a_deadline_noticed_by_the_target_is_a_passed_deadline(client: OutriderClient) -> None:
    assert failure(lambda: client.generate("miss the deadline")).code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_passed_deadline_ends_the_call_and_the_targets_work(address: str, meeting_point: Path, way: str) -> None:
    """Set in the request alone: the server has to notice it without the client's help."""
    request_id = f"r-late-{way}"
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if way == "unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id, timeout_ms=4000))
        else:
            call = iter(
                stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id, timeout_ms=4000))
            )
            assert next(call).text_delta == "one "
        with pytest.raises(grpc.RpcError) as caught:
            call.result()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert request_id in caught.value.details()
    wait_for((meeting_point / f"{request_id}.cancelled").exists)


@pytest.mark.parametrize("way", ["cancelled stream", "cancelled unary", "dropped connection"])
def test_a_client_that_leaves_stops_the_targets_work(address: str, meeting_point: Path, way: str) -> None:
    request_id = f"r-{way.replace(' ', '-')}"
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if way == "cancelled unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id))
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id))
        wait_for((meeting_point / f"{request_id}.started").exists)
        assert not (meeting_point / f"{request_id}.cancelled").exists()
        if way == "dropped connection":
            channel.close()
        else:
            call.cancel()
        wait_for((meeting_point / f"{request_id}.cancelled").exists)


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


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_an_aborted_request_ends_and_its_targets_work_too(address: str, meeting_point: Path, way: str) -> None:
    """From another connection. The target does not know the request, so it is the ingress that ends it."""
    request_id = f"r-abort-{way}"
    with grpc.insecure_channel(address) as channel, grpc.insecure_channel(address) as other:
        stub = rpc.GenerationServiceStub(channel)
        if way == "unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id))
            wait_for((meeting_point / f"{request_id}.started").exists)
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id))
            assert next(call).text_delta == "one "
        abort = rpc.GenerationServiceStub(other).AbortRequest
        assert abort(pb.AbortRequestRequest(request_id=request_id)).aborted
        answer = call.result() if way == "unary" else list(call)[-1]
        assert answer.finish_reason == pb.FINISH_REASON_ABORT
        assert answer.usage.completion_tokens == 1
        wait_for((meeting_point / f"{request_id}.cancelled").exists)
        assert (meeting_point / f"{request_id}.asked").exists()
        assert not abort(pb.AbortRequestRequest(request_id=request_id)).aborted
        with pytest.raises(grpc.RpcError) as caught:
            abort(pb.AbortRequestRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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
