"""OutriderHandle over a scripted DeploymentHandle: errors on the way, and cancellation.

Against a running application: tests/integration/test_handle.py.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from outrider.deploy.client.handle import OutriderHandle
from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1.handle_calls import CallFailed
from tests.unit.scripted_service import LOST, REFUSED

HANG = "hang"


def failed(failure: tuple[grpc.StatusCode, str]) -> CallFailed:
    return CallFailed(failure[0].value[0], failure[1])


class ScriptedHandle:
    """Stands in for Serve's handle. Each call takes the next script: messages, exceptions or HANG."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.responses = list(scripts), []
        self.handle_unary = self.handle_stream = self

    def options(self, *, stream: bool) -> ScriptedHandle:
        assert stream
        return self

    def remote(self, rpc: str, request: bytes) -> ScriptedResponse:
        self.responses.append(ScriptedResponse(self.scripts.pop(0)))
        return self.responses[-1]


class ScriptedResponse:
    def __init__(self, script: list[Any]) -> None:
        self._script, self.cancelled = list(script), False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self.__anext__().__await__()

    async def __anext__(self) -> bytes:
        if not self._script:
            raise StopAsyncIteration
        step = self._script.pop(0)
        if step is HANG:
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            raise step
        return step.SerializeToString()


PART = pb.GenerateStreamResponse(text_delta="part")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(REFUSED), grpc.StatusCode.INVALID_ARGUMENT),
        (failed(LOST), grpc.StatusCode.UNAVAILABLE),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RayActorError(), grpc.StatusCode.UNAVAILABLE),
        (TaskCancelledError(), grpc.StatusCode.CANCELLED),
        (ValueError("a mistake"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_whatever_goes_wrong_on_the_way_is_one_kind_of_error(error: Exception, code: grpc.StatusCode) -> None:
    with pytest.raises(OutriderError) as caught:
        await OutriderHandle(ScriptedHandle([error])).generate("hi", request_id="mine")
    assert caught.value.code is code
    assert caught.value.request_id == "mine"
    assert caught.value.field == ("sampling.temperature" if code is grpc.StatusCode.INVALID_ARGUMENT else None)
    with pytest.raises(OutriderError) as caught:
        await anext(OutriderHandle(ScriptedHandle([error])).stream("hi"))
    assert caught.value.code is code


@pytest.mark.parametrize("error", [failed(LOST), RayActorError()], ids=["said", "of the way"])
async def test_health_is_yes_or_no(error: Exception) -> None:
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    handle = OutriderHandle(ScriptedHandle([serving], [error]))
    assert (await handle.healthy(), await handle.healthy()) == (True, False)


async def test_a_call_is_cancelled_unless_it_has_ended() -> None:
    serve_handle = ScriptedHandle([HANG], [PART, PART], [PART, PART], [PART])
    handle = OutriderHandle(serve_handle)
    with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
        await handle.generate("hi", timeout_s=0.02)
    async with handle.stream("hi") as left:
        await anext(left)
    assert [message async for message in left] == []
    dropped = handle.stream("hi")
    await anext(dropped)
    del dropped
    gc.collect()
    async with handle.stream("hi") as ended:
        assert len([message async for message in ended]) == 1
    assert [response.cancelled for response in serve_handle.responses] == [True, True, True, False]
