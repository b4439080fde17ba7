"""Mounts what Outrider serves over gRPC on Serve's proxies: what ``grpc_servicer_functions`` should name.

The generated functions would do, but for what outrider.actors.serving.grpc.door does around every call. So they get to
see a stand-in for the server, which puts the door in front of the handlers that Serve makes.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.proxy_request_response import gRPCStreamingType

from outrider.actors.serve_seam import leans_on
from outrider.actors.serving.grpc.door import ProxiedCall, proxied_call, tolerant
from outrider.v1 import generation_pb2_grpc


def add_services(servicer: Any, server: Any) -> None:
    """GenerationService and grpc.health.v1.Health on one of Serve's gRPC servers."""
    leans_on.GRPC_PROXY.check()
    mount = _Mount(server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, mount)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, mount)


class _Mount:
    """What the generated functions see in place of the server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Done below: the same handlers come a second time, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        read_here = {
            name: handler._replace(request_streaming=True, request_deserializer=tolerant(handler.request_deserializer))
            for name, handler in handlers.items()
        }
        make_handler = self._server.service_handler_factory

        def make_call(service_method: str, streaming_type: gRPCStreamingType) -> ProxiedCall:
            streams = streaming_type in (gRPCStreamingType.UNARY_STREAM, gRPCStreamingType.STREAM_STREAM)
            kind = gRPCStreamingType.UNARY_STREAM if streams else gRPCStreamingType.UNARY_UNARY
            return proxied_call(service_method, make_handler(service_method, kind), streams=streams)

        self._server.service_handler_factory = make_call
        try:
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, read_here),))
            self._server.add_registered_method_handlers(service, read_here)
        finally:
            self._server.service_handler_factory = make_handler
