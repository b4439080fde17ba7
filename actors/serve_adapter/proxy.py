"""Configures Serve's proxies where they have no option: address and keepalive of gRPC, reflection, clients that leave.

Serve calls `middlewares` in each proxy before it starts its servers, by
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``, which `outrider serve` sets. It adds no middleware.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio
from ray.serve._private import default_impl
from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS
from ray.serve._private.logging_utils import format_grpc_peer_address
from ray.serve._private.proxy_request_response import gRPCProxyRequest, gRPCStreamingType
from starlette.middleware import Middleware

from outrider.actors.serve_adapter import GRPC_HOST_VARIABLE
from outrider.actors.serving.failures import is_message_of_serve, silence_client_disconnect_logs, silence_refusal_logs
from outrider.v1 import generation_pb2, generation_pb2_grpc

VERSIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
REFLECTED = (generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name, "grpc.health.v1.Health")

PINGS = (
    # Clients ping every 10 s and more while a call is quiet. gRPC's server ends such connections otherwise.
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def middlewares() -> list[Middleware]:
    """Prepares the proxy that this process is. Returns no middleware."""
    silence_refusal_logs()
    silence_client_disconnect_logs()
    DEFAULT_GRPC_SERVER_OPTIONS[:] = [*DEFAULT_GRPC_SERVER_OPTIONS, *PINGS]
    default_impl.add_grpc_address = add_grpc_address
    gRPCProxyRequest.client = property(client_address)
    return []


def client_address(request: gRPCProxyRequest) -> str:
    """Returns a gRPC client's address for Serve's access log, as it was when the call began.

    Serve asks gRPC when the call has ended, and where the client has left, that ends the process (SIGSEGV).
    """
    return format_grpc_peer_address(request.ray_serve_grpc_context.peer())


def add_grpc_address(server: Any, address: str) -> None:
    """Binds the gRPC server. address: Serve's own, which is every interface and the port."""
    host = os.environ.get(GRPC_HOST_VARIABLE, "[::]")
    port = address.rpartition(":")[2]
    server.add_insecure_port(f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}")


def add_services(servicer: Any, server: Any) -> None:
    """Adds GenerationService and Health to one of Serve's gRPC servers."""
    make_handler = server.service_handler_factory
    server.service_handler_factory = lambda service_method, streaming_type: guarded(
        make_handler(service_method, streaming_type), streaming_type
    )
    try:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    finally:
        server.service_handler_factory = make_handler


def guarded(handler: Any, streaming_type: gRPCStreamingType) -> Any:
    """Wraps a handler of Serve's: it cancels its request whenever the client leaves, and hides messages of Ray's.

    gRPC cancels a handler where it waits. While that is a write, Serve's generator does not run, and is dropped: the
    request would go on in the replica, where nobody can know. Here a task of its own always waits in the generator.
    """

    async def unary(request: Any, context: Any) -> Any:
        response = await handler(request, context)
        _replace_message_of_ray(context)
        return response

    async def stream(request: Any, context: Any) -> None:
        messages = asyncio.Queue[Any]()

        async def read() -> None:
            try:
                async for message in handler(request, context):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (message := await messages.get()) is not None:
                await context.write(message)
            await reading
            _replace_message_of_ray(context)
        finally:
            reading.cancel()

    return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary


def _replace_message_of_ray(context: Any) -> None:
    if is_message_of_serve(context.code(), context.details() or ""):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the server lost the process that was answering the request; retry")


def add_reflection(servicer: Any, server: Any) -> None:
    """Adds server reflection, v1 and v1alpha, which the proxy answers itself. Both have the same messages; gRPC for
    Python ships the code of the older one."""
    reflecting = aio.ReflectionServicer([*REFLECTED, *VERSIONS])
    method = grpc.stream_stream_rpc_method_handler(
        reflecting.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in VERSIONS:
        server.add_passthrough_service(service)
        handlers = {"ServerReflectionInfo": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)
