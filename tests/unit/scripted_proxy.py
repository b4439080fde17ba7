"""Serve's own gRPC server with our services on it, and scripted handlers where Serve's and the ingress would be."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.common import DeploymentID, EndpointInfo, gRPCRequest
from ray.serve._private.grpc_util import enable_server_reflection, gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.generated.serve_pb2_grpc import add_RayServeAPIServiceServicer_to_server

from outrider.actors.serve_seam import grpc_proxy
from outrider.actors.serve_seam.grpc_proxy import add_services, mount_serves_own
from outrider.actors.serving.failures import CallFailure
from outrider.actors.serving.gate import Doors
from outrider.actors.serving.grpc import door, reflection
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

FAILURE = CallFailure(grpc.StatusCode.ALREADY_EXISTS, "taken", "REQUEST_ID_IN_USE", request_id="r-1")
BIG = "x" * 100_000
HUGE = "x" * (12 << 20)


def router(**routes: str) -> ProxyRouter:
    """Serve's, of applications and the routes before their paths."""
    made = ProxyRouter(lambda endpoint, info: SimpleNamespace(deployment_id=endpoint))
    made.update_routes({DeploymentID("Ingress", name): EndpointInfo(route=route) for name, route in routes.items()})
    return made


def sent_on(request: Any) -> Any:
    """As the ingress gets what a handler was given."""
    return pickle.loads(pickle.dumps(gRPCRequest(user_request_proto=request))).user_request_proto


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
        self.proxy_router = router(outrider="/")

    def make_handler(self, service_method: str, streaming_type: gRPCStreamingType) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            request = sent_on(request)
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
            request = sent_on(request)
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
async def serving_port(proxy: Proxy) -> AsyncIterator[int]:
    server = gRPCGenericServer(proxy.make_handler)
    mount_serves_own(server)
    add_RayServeAPIServiceServicer_to_server(Mock(), server)  # as Serve does
    add_services(object_with_every_method(), server)
    enable_server_reflection(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def channel_to(port: int) -> grpc.aio.Channel:
    """With a connection of its own, and HTTP/2 windows that stay as they are: those that follow the bandwidth take up
    to 16 MiB of each answer that nobody reads, as much as their probes happened to measure."""
    options = [
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
    ]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)


@asynccontextmanager
async def serving(proxy: Proxy) -> AsyncIterator[grpc.aio.Channel]:
    async with serving_port(proxy) as port, channel_to(port) as channel:
        yield channel


@asynccontextmanager
async def from_another_address(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """A channel whose calls come from 127.0.0.2."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        with suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))

    relays = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with channel_to(relays.sockets[0].getsockname()[1]) as channel:
        yield channel
    relays.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def limit(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> Doors:
    doors = Doors(LimitsConfig(**limits))
    for module in (door, reflection, grpc_proxy):
        monkeypatch.setattr(module, "doors", lambda: doors)
    return doors


def object_with_every_method() -> Any:
    class Servicer(rpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer): ...

    return Servicer()
