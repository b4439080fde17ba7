"""Other Serve applications call the RPCs on the ingress and get responses or a status."""

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


class ScriptedIngress(HandleCalls):
    """Answers by the prompt's text."""

    def __init__(self) -> None:
        self.closed = 0

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        if request.text == "break":
            raise ZeroDivisionError("before a status was chosen")
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
                raise ConnectionError("gone")
        finally:
            self.closed += 1


async def generated(text: str) -> str:
    data = await ScriptedIngress().handle_unary("Generate", pb.GenerateRequest(text=text).SerializeToString())
    return pb.GenerateResponse.FromString(data).text


async def test_a_call_returns_a_response_or_the_status_that_grpc_would_have_sent() -> None:
    assert await generated("hi") == "hi"
    with pytest.raises(CallFailed) as caught:
        await generated("refuse")
    failed = pickle.loads(pickle.dumps(caught.value))
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert failed.details == "sampling.n: 0 is none; send 1"
    with pytest.raises(ZeroDivisionError):
        await generated("break")
    with pytest.raises(KeyError):
        await ScriptedIngress().handle_unary("__init__", b"")


async def test_a_stream_yields_its_messages_before_a_failure_and_closes_what_it_reads_from() -> None:
    ingress, request = ScriptedIngress(), pb.GenerateStreamRequest(text="a b").SerializeToString()
    responses = ingress.handle_stream("GenerateStream", request)
    parts = [pb.GenerateStreamResponse.FromString(await anext(responses)).text_delta for _ in range(2)]
    assert parts == ["a", "b"]
    with pytest.raises(CallFailed) as caught:
        await anext(responses)
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE.value[0]
    left = ingress.handle_stream("GenerateStream", request)
    await anext(left)
    assert ingress.closed == 1
    await left.aclose()
    assert ingress.closed == 2
