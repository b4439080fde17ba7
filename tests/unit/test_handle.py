"""OutriderHandle with a scripted DeploymentHandle: what happens on the way there, retries, cancelling."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError, RequestCancelledError

from outrider.deploy.client.error import OutriderError
from outrider.deploy.client.handle import OutriderHandle
from outrider.v1 import generation_pb2 as pb
from outrider.v1.handle_calls import CallFailed
from tests.unit.scripted_service import LOST, REFUSED

HANG = "hang"


def failed(failure: Any) -> CallFailed:
    return CallFailed(failure.code.value[0], failure.message, tuple(failure.trailing_metadata()))


class ScriptedHandle:
    """Stands in for Serve's handle. Each call takes the next of script: a message, an exception, HANG, or a list of
    these for a stream."""

    def __init__(self, *script: Any) -> None:
        self.script, self.sent, self.responses = list(script), [], []
        self.handle_unary = self.handle_stream = self

    def options(self, *, stream: bool) -> ScriptedHandle:
        assert stream
        return self

    def remote(self, rpc: str, request: bytes) -> ScriptedResponse:
        self.sent.append((rpc, request))
        self.responses.append(ScriptedResponse(self.script.pop(0)))
        return self.responses[-1]


class ScriptedResponse:
    def __init__(self, script: Any) -> None:
        self._script, self.cancelled = script, False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self._play(self._script).__await__()

    async def __anext__(self) -> bytes:
        if not self._script:
            raise StopAsyncIteration
        return await self._play(self._script.pop(0))

    @staticmethod
    async def _play(step: Any) -> bytes:
        if step is HANG:
            await asyncio.sleep(3600)
        if isinstance(step, Exception):
            raise step
        return step.SerializeToString()


WHOLE = pb.GenerateResponse(text="whole")
PART = pb.GenerateStreamResponse(text_delta="part")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(REFUSED), grpc.StatusCode.INVALID_ARGUMENT),
        (failed(LOST), grpc.StatusCode.UNAVAILABLE),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ReplicaUnavailableError("r"), grpc.StatusCode.UNAVAILABLE),
        (RayActorError(), grpc.StatusCode.UNAVAILABLE),
        (TaskCancelledError(), grpc.StatusCode.CANCELLED),
        (RequestCancelledError("r"), grpc.StatusCode.CANCELLED),
        (ValueError("a mistake"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_whatever_goes_wrong_on_the_way_is_one_kind_of_error(error: Exception, code: grpc.StatusCode) -> None:
    with pytest.raises(OutriderError) as caught:
        await OutriderHandle(ScriptedHandle(error)).generate("hi", request_id="mine")
    assert caught.value.code is code
    assert caught.value.request_id in ("mine", "r-1")
    with pytest.raises(OutriderError) as caught:
        await anext(OutriderHandle(ScriptedHandle([error])).stream("hi"))
    assert caught.value.code is code


async def test_a_refusal_keeps_its_details() -> None:
    with pytest.raises(OutriderError) as caught:
        await OutriderHandle(ScriptedHandle(failed(REFUSED))).generate("hi")
    assert [each.field for each in caught.value.field_violations] == ["sampling.temperature"]
    assert (caught.value.request_id, caught.value.reason) == ("r-1", "INVALID_REQUEST")


async def test_retries_are_those_of_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr("outrider.deploy.client.handle.asyncio.sleep", sleep)
    lost = failed(LOST)
    assert (await OutriderHandle(ScriptedHandle(lost, WHOLE), retries=1).generate("hi")).text == "whole"
    stream = OutriderHandle(ScriptedHandle([lost], [PART, PART]), retries=1).stream("hi")
    assert len([message async for message in stream]) == 2
    assert waits == [1.0, 1.0]
    broken = OutriderHandle(ScriptedHandle([PART, lost], [PART]), retries=1).stream("hi")
    await anext(broken)
    with pytest.raises(OutriderError, match="UNAVAILABLE"):
        await anext(broken)
    assert [message async for message in broken] == []


@pytest.mark.parametrize("script", [HANG, [PART, HANG]], ids=["unary", "stream"])
async def test_a_deadline_cancels_the_call(script: Any) -> None:
    serve_handle = ScriptedHandle(script)
    handle = OutriderHandle(serve_handle)
    with pytest.raises(OutriderError) as caught:
        await ask(handle, streaming=isinstance(script, list), timeout_s=0.02)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert serve_handle.responses[0].cancelled
    assert pb.GenerateRequest.FromString(serve_handle.sent[0][1]).timeout_ms == 20


@pytest.mark.parametrize("script", [HANG, [PART, HANG]], ids=["unary", "stream"])
async def test_cancelling_the_task_cancels_the_call(script: Any) -> None:
    serve_handle = ScriptedHandle(script)
    asking = asyncio.create_task(ask(OutriderHandle(serve_handle), streaming=isinstance(script, list)))
    for _ in range(5):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert serve_handle.responses[0].cancelled


async def test_a_stream_that_is_left_or_dropped_is_cancelled_and_one_that_ended_is_not() -> None:
    serve_handle = ScriptedHandle([PART, PART], [PART, PART], [PART])
    handle = OutriderHandle(serve_handle)
    async with handle.stream("hi") as left:
        await anext(left)
    assert [message async for message in left] == []
    dropped = handle.stream("hi")
    await anext(dropped)
    del dropped
    gc.collect()
    async with handle.stream("hi") as ended:
        assert len([message async for message in ended]) == 1
    assert [response.cancelled for response in serve_handle.responses] == [True, True, False]


async def ask(handle: OutriderHandle, *, streaming: bool, **options: Any) -> None:
    if streaming:
        async for _ in handle.stream("hi", **options):
            pass
    else:
        await handle.generate("hi", **options)
