"""A real gRPC server in this process, whose answers are scripted by the prompt's text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

HANG_GUARD_S = 60.0
"""How long a test waits for what should happen at once. "hang" hangs for twice as long."""

Failure = tuple[grpc.StatusCode, str]

REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: -1.0 is out of range; send more")
LOST = (grpc.StatusCode.UNAVAILABLE, "the target replica is not available; retry")
FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later")


class ScriptedService(rpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer):
    """Keeps what it was asked. failing: failures of the next generations, one each."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.deadline_s: float | None = None
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.failing: list[Failure] = []
        self.status = pb.GetServerStatusResponse(model="pair")
        self.health: int | grpc.StatusCode = health_pb2.HealthCheckResponse.SERVING

    def _note(self, request: Any, context: grpc.ServicerContext) -> threading.Event:
        """Returns what is set when the call is over."""
        self.requests.append(request)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        remaining = context.time_remaining()
        self.deadline_s = remaining if remaining is not None and remaining < 1e6 else None
        over = threading.Event()
        context.add_callback(over.set)
        context.add_callback(self.cancelled.set)
        self.started.set()
        if self.failing:
            context.abort(*self.failing.pop(0))
        return over

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        over = self._note(request, context)
        if request.text == "hang":
            over.wait(2 * HANG_GUARD_S)
        if request.text == "refuse":
            context.abort(*REFUSED)
        if request.text == "lose":
            context.abort(*LOST)
        return pb.GenerateResponse(text="whole", token_ids=[1, 2])

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        over = self._note(request, context)
        yield pb.GenerateStreamResponse(text_delta="one ", token_ids=[1])
        if request.text == "hang":
            over.wait(2 * HANG_GUARD_S)
        if request.text == "break":
            context.abort(grpc.StatusCode.INTERNAL, "request r failed inside the server; its log says why")
        if request.text == "lose":
            context.abort(*LOST)
        yield pb.GenerateStreamResponse(text_delta="two", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self._note(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2], count=2)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        self._note(request, context)
        return pb.DetokenizeResponse(text="text")

    def AbortRequest(self, request: pb.AbortRequestRequest, context: grpc.ServicerContext) -> pb.AbortRequestResponse:
        self._note(request, context)
        return pb.AbortRequestResponse(aborted=request.request_id == "r-running")

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(model="pair", vocab_size=300)

    def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(outrider_version="0.1.0")

    def GetServerStatus(
        self, request: pb.GetServerStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetServerStatusResponse:
        return self.status

    def RevertDrafter(
        self, request: pb.RevertDrafterRequest, context: grpc.ServicerContext
    ) -> pb.RevertDrafterResponse:
        self._note(request, context)
        return pb.RevertDrafterResponse(serving=9)

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        assert request.service == "outrider.v1.GenerationService"
        if isinstance(self.health, grpc.StatusCode):
            context.abort(self.health, "no")
        return health_pb2.HealthCheckResponse(status=self.health)


@contextmanager
def serving(
    service: ScriptedService, port: int = 0, credentials: grpc.ServerCredentials | None = None
) -> Iterator[str]:
    """Its address while it serves."""
    server = grpc.server(ThreadPoolExecutor(8))
    rpc.add_GenerationServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    host = f"127.0.0.1:{port}"
    port = server.add_insecure_port(host) if credentials is None else server.add_secure_port(host, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
