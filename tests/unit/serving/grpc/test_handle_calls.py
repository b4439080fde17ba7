"""What other Serve applications call on the ingress: the methods of gRPC, with a context of their own."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator

import grpc
import pytest
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.failures import errors_become_status
from outrider.actors.serving.grpc.calls import HandleCalls
from outrider.v1 import generation_pb2 as pb
from outrider.v1.handle_calls import CallFailed


class Door(HandleCalls):
    """An ingress whose answers are scripted."""

    def __init__(self) -> None:
        self.closed = 0

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        with errors_become_status(grpc_context, "request r"):
            if request.text == "refuse":
                raise RequestError("sampling.n", "0 is none", "send 1")
            return pb.GenerateResponse(text=request.text)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        try:
            with errors_become_status(grpc_context, "request r"):
                for part in request.text.split():
                    yield pb.GenerateStreamResponse(text_delta=part)
                    if part == "lose":
                        raise ConnectionError("gone")
        finally:
            self.closed += 1

    async def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerStatusResponse:
        raise ZeroDivisionError("a mistake before anything was said")


async def test_a_response_comes_back_serialised() -> None:
    data = await Door().handle_unary("Generate", pb.GenerateRequest(text="hi").SerializeToString())
    assert pb.GenerateResponse.FromString(data).text == "hi"


async def test_a_refusal_carries_what_grpc_would_have_sent() -> None:
    with pytest.raises(CallFailed) as caught:
        await Door().handle_unary("Generate", pb.GenerateRequest(text="refuse").SerializeToString())
    failed = pickle.loads(pickle.dumps(caught.value))
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert failed.details == "sampling.n: 0 is none; send 1"


async def test_messages_come_before_the_failure() -> None:
    request = pb.GenerateStreamRequest(text="a lose")
    responses = Door().handle_stream("GenerateStream", request.SerializeToString())
    parts = [pb.GenerateStreamResponse.FromString(await anext(responses)).text_delta for _ in range(2)]
    assert parts == ["a", "lose"]
    with pytest.raises(CallFailed) as caught:
        await anext(responses)
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_closing_a_stream_closes_what_it_reads_from() -> None:
    door = Door()
    responses = door.handle_stream("GenerateStream", pb.GenerateStreamRequest(text="a b c").SerializeToString())
    await anext(responses)
    assert door.closed == 0
    await responses.aclose()
    assert door.closed == 1


async def test_what_no_status_was_chosen_for_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        await Door().handle_unary("GetServerStatus", b"")


async def test_only_rpcs_can_be_called() -> None:
    with pytest.raises(KeyError):
        await Door().handle_unary("__init__", b"")
