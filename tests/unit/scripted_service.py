"""A real gRPC server in this process, whose answers are scripted by the prompt's text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.actors.serving.failures import REQUEST_ID_METADATA, CallFailure
from outrider.actors.serving.grpc.responses import LOAD_METADATA
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

HANG_GUARD_S = 60.0
"""How long a test waits for what should happen at once. "hang" hangs for twice as long."""

REFUSED = CallFailure(
    grpc.StatusCode.INVALID_ARGUMENT,
    "sampling.temperature: -1.0 is out of range; send more",
    "INVALID_REQUEST",
    {"sampling.temperature": "-1.0 is out of range; send more"},
    "r-1",
)
LOST = CallFailure(grpc.StatusCode.UNAVAILABLE, "the target replica is not available; retry", "REPLICA_UNAVAILABLE")
FULL = CallFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full; retry later", "QUEUE_FULL")


class ScriptedService(rpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer):
    """Keeps what it was asked.

    failing: failures of the next generations, one each. held: requests it says it holds, at the end of a call.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.deadline_s: float | None = None
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.failing: list[CallFailure] = []
        self.held: int | None = None
        self.running = {"r-running"}
        self.status = pb.GetServerStatusResponse(model="pair")
        self.health: int | grpc.StatusCode = health_pb2.HealthCheckResponse.SERVING

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        remaining = context.time_remaining()
        self.deadline_s = remaining if remaining is not None and remaining < 1e6 else None
        context.add_callback(self.cancelled.set)
        self.started.set()
        if self.failing:
            self._fail(context, self.failing.pop(0))
        if self.held is not None:
            metrics = {"num_requests_running": self.held, "num_requests_waiting": 0}
            report = pb.LoadReport(named_metrics=metrics).SerializeToString()
            context.set_trailing_metadata([*((key, report) for key in LOAD_METADATA), (REQUEST_ID_METADATA, "r-1")])

    @staticmethod
    def _fail(context: grpc.ServicerContext, failure: CallFailure) -> None:
        context.set_trailing_metadata(failure.trailing_metadata())
        context.abort(failure.code, failure.message)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._note(request, context)
        if request.text == "hang":
            self.cancelled.wait(2 * HANG_GUARD_S)
        if request.text == "refuse":
            self._fail(context, REFUSED)
        if request.text == "lose":
            self._fail(context, LOST)
        return pb.GenerateResponse(text="whole", token_ids=[1, 2])

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._note(request, context)
        yield pb.GenerateStreamResponse(text_delta="one ", token_ids=[1])
        if request.text == "hang":
            self.cancelled.wait(2 * HANG_GUARD_S)
        if request.text == "break":
            context.abort(grpc.StatusCode.INTERNAL, "request r failed inside the server; its log says why")
        if request.text == "lose":
            self._fail(context, LOST)
        yield pb.GenerateStreamResponse(text_delta="two", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self._note(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2], count=2)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        self._note(request, context)
        return pb.DetokenizeResponse(text="text")

    def AbortRequest(self, request: pb.AbortRequestRequest, context: grpc.ServicerContext) -> pb.AbortRequestResponse:
        self._note(request, context)
        return pb.AbortRequestResponse(aborted=request.request_id in self.running)

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
