"""Serve's own gRPC server with our services on it, and scripted handlers where Serve's and the ingress would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType

from outrider.actors.serve_seam.grpc_proxy import add_services
from outrider.actors.serving.failures import CallFailure
from outrider.actors.serving.gate import Doors
from outrider.actors.serving.grpc import door
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

FAILURE = CallFailure(grpc.StatusCode.ALREADY_EXISTS, "taken", "REQUEST_ID_IN_USE", request_id="r-1")
BIG = "x" * 100_000
HUGE = "x" * (12 << 20)


class Proxy:
    """Makes handlers the way Serve's proxy does. What they do is up to the request's id."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.metadata: list[list[tuple[str, Any]]] = []
        """Of each call, as the handler gets it."""

        self.told: list[tuple[str, str]] = []
        self.sent = 0
        self.read = asyncio.Semaphore(10)
        """Released by a client for each message of a "paced" answer."""

        self.cancelled = asyncio.Event()

    def make_handler(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            self.asked.append((service_method, request))
            self.metadata.append(list(context.invocation_metadata()))
            if _id(request) == "wait":
                await self.read.acquire()
            if _id(request) == "huge":
                return pb.GenerateResponse(text=HUGE).SerializeToString()
            if _id(request) == "fail":
                context.set_code(FAILURE.code)
                context.set_details(FAILURE.packed())
                return b""
            context.set_trailing_metadata([("kept", "yes"), *self.told])
            return b""

        async def stream(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
            self.asked.append((service_method, request))
            try:
                if _id(request) in ("flood", "paced"):
                    for _ in range(500):
                        if _id(request) == "paced":
                            await self.read.acquire()
                        self.sent += 1
                        yield pb.GenerateStreamResponse(text_delta=BIG).SerializeToString()
                        await asyncio.sleep(0)
                    await asyncio.sleep(60)
                if _id(request) in ("fail", "fail at once"):
                    yield pb.GenerateStreamResponse(text_delta="first").SerializeToString()
                    if _id(request) == "fail at once":  # the message took the failure along
                        context.set_trailing_metadata(FAILURE.trailing_metadata())
                    context.set_code(FAILURE.code)
                    context.set_details(FAILURE.packed())
                    return
                if _id(request) == "huge":
                    for delta in ("small", HUGE, "last"):  # at once: the huge one waits behind the small one
                        yield pb.GenerateStreamResponse(text_delta=delta).SerializeToString()
                    return
                if _id(request) in ("huge twice", "huge twice, then a stall"):
                    for delta in (HUGE, HUGE):
                        yield pb.GenerateStreamResponse(text_delta=delta).SerializeToString()
                    if _id(request) == "huge twice":
                        return
                    await asyncio.sleep(60)
                yield pb.GenerateStreamResponse(text_delta="whole").SerializeToString()
                if service_method.endswith("Watch"):
                    await asyncio.sleep(60)
                if _id(request) == "hang":
                    await asyncio.sleep(60)
            except asyncio.CancelledError:  # as Serve's: it ends the call for the replica and says so
                self.cancelled.set()
                if not context.code():
                    context.set_code(grpc.StatusCode.CANCELLED)

        streamed = streaming_type in (gRPCStreamingType.UNARY_STREAM, gRPCStreamingType.STREAM_STREAM)
        return stream if streamed else unary


def _id(request: Any) -> str:
    """Empty for messages that have none."""
    return getattr(request, "request_id", "")


@asynccontextmanager
async def serving(proxy: Proxy) -> AsyncIterator[grpc.aio.Channel]:
    server = gRPCGenericServer(proxy.make_handler)
    add_services(object_with_every_method(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        options = [("grpc.max_receive_message_length", 64 << 20)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            yield channel
    finally:
        await server.stop(None)


def limit(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Doors:
    doors = Doors(LimitsConfig(**limits))
    monkeypatch.setattr(door, "doors", lambda: doors)
    return doors


def object_with_every_method() -> Any:
    class Servicer(rpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer): ...

    return Servicer()
