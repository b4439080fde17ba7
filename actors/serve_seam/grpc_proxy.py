"""Mounts what Outrider serves over gRPC on Serve's proxies: what ``grpc_servicer_functions`` should name.

The generated functions would do, but for what outrider.actors.serving.grpc.door does around every call. So they get to
see a stand-in for the server, which puts the door in front of the handlers that Serve makes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS
from ray.serve._private.proxy_request_response import gRPCStreamingType

from outrider.actors.serve_seam import leans_on
from outrider.actors.serving.access.budget import Weighed, hand_on
from outrider.actors.serving.access.calls import guarded_rpc
from outrider.actors.serving.access.process import proxy_guard
from outrider.actors.serving.gate import Routes, doors
from outrider.actors.serving.grpc.door import (
    ProxiedCall,
    most_bytes_of,
    of_counted_connection,
    proxied_call,
    tolerant,
)
from outrider.actors.serving.grpc.reflection import bounded_stream
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2_grpc

KEEPALIVE_MS = 60_000
"""A connection on which nothing comes for so long is asked whether its other end is there."""

_RECEIVE = "grpc.max_receive_message_length"
_limited = False

logger = logging.getLogger("ray.serve.outrider.proxy")


def limit_server(limits: LimitsConfig) -> None:
    """Before Serve makes its gRPC server. gRPC's own refusal has no details, so it begins at twice the size."""
    global _limited
    leans_on.GRPC_SERVER.check()
    ours = {
        _RECEIVE: 2 * limits.max_request_bytes,
        # Beyond limits.max_connections, which connections.Watch sees to; this is for what comes between two looks.
        "grpc.max_allowed_incoming_connections": 2 * limits.max_connections,
        "grpc.max_concurrent_streams": limits.max_streams_per_connection,
        "grpc.max_connection_idle_ms": int(limits.connection_idle_timeout_s * 1000),
        "grpc.server_handshake_timeout_ms": int(limits.receive_timeout_s * 1000),
        "grpc.keepalive_time_ms": KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": int(limits.unread_timeout_s * 1000),
    }
    kept = [option for option in DEFAULT_GRPC_SERVER_OPTIONS if option[0] not in ours]
    DEFAULT_GRPC_SERVER_OPTIONS[:] = [*kept, *ours.items()]
    cygrpc.AioServer = ServerOfAnyPath  # gRPC looks it up when a server is made
    _limited = True


class ServerOfAnyPath(cygrpc.AioServer):
    """gRPC's own reads the path of a call that is registered nowhere as UTF-8, in the loop that takes all calls: the
    first that is none ends it, with every call that is under way, and the port. Here every method is registered, and
    what else comes is told unread that there is no such method."""

    def __init__(self, *args: Any) -> None:
        self._generic: dict[str, Any] = {}
        self._registered: set[str] = set()
        super().__init__(*args)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        super().add_generic_rpc_handlers(generic_rpc_handlers)
        for handlers in generic_rpc_handlers:
            self._generic |= handlers._method_handlers

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        super().add_registered_method_handlers(method_handlers)
        self._registered |= method_handlers.keys()

    async def start(self) -> None:
        """Services whose code is older than registering have added themselves as generic ones alone."""
        self.add_registered_method_handlers(
            {path: handler for path, handler in self._generic.items() if path not in self._registered}
        )
        await super().start()

    async def _request_call(self) -> Any:
        """The next call that is registered nowhere. There is none for whoever asks: it is answered here."""
        loop, answers = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            call = await super()._request_call()
            answer = cygrpc._handle_rpc("", cygrpc._MethodResolver([], {}), (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answers.add(task)
            task.add_done_callback(answers.discard)


def add_services(servicer: Any, server: Any) -> None:
    """GenerationService and grpc.health.v1.Health on one of Serve's gRPC servers."""
    leans_on.GRPC_PROXY.check()
    if not _limited:
        logger.warning(
            "gRPC messages of up to 2 GiB are taken in before they are refused, and connections have no limits: "
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH is not set on this node; see docs/configuration.md, limits"
        )
    router = server.service_handler_factory.__self__.proxy_router  # of its HTTP proxy too
    doors().routes = Routes(
        partial(_application, router.get_handle_for_endpoint), partial(_application, router.match_route)
    )
    mount = _Mount(server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, mount)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, mount)


def _application(find: Callable[[str], tuple[str, Any, bool] | None], name: str) -> str | None:
    found = find(name)
    return None if found is None else str(found[1].deployment_id.app_name)


SERVES_OWN = "ray.serve.RayServeAPIService"


def mount_serves_own(server: Any) -> None:
    """Serve's own service, and what it answers by itself, which is reflection: through the same door as ours. Before
    Serve adds any service to the server."""
    answers_itself = server.add_passthrough_service
    add_generic, add_registered = server.add_generic_rpc_handlers, server.add_registered_method_handlers
    by_itself: set[str] = set()

    def add_passthrough_service(service_name: str) -> None:
        by_itself.add(service_name)
        answers_itself(service_name)

    def add_generic_rpc_handlers(generic_rpc_handlers: Sequence[Any]) -> None:
        service = generic_rpc_handlers[0].service_name()
        if service == SERVES_OWN:
            handlers = generic_rpc_handlers[0]._method_handlers
            server.add_generic_rpc_handlers, server.add_registered_method_handlers = add_generic, add_registered
            try:
                by_name = {path.rpartition("/")[2]: handler for path, handler in handlers.items()}
                _Mount(server).add_registered_method_handlers(service, by_name)
            finally:
                server.add_generic_rpc_handlers = add_generic_rpc_handlers
                server.add_registered_method_handlers = add_registered_method_handlers
        elif service not in by_itself:  # those come a second time, by name
            add_generic(generic_rpc_handlers)

    def add_registered_method_handlers(service_name: str, method_handlers: dict[str, Any]) -> None:
        if service_name in by_itself:
            handlers = {name: _reflecting(f"/{service_name}/{name}", made) for name, made in method_handlers.items()}
            add_generic((grpc.method_handlers_generic_handler(service_name, handlers),))
            add_registered(service_name, handlers)
        elif service_name != SERVES_OWN:
            add_registered(service_name, method_handlers)

    server.add_passthrough_service = add_passthrough_service
    server.add_registered_method_handlers = add_registered_method_handlers
    server.add_generic_rpc_handlers = add_generic_rpc_handlers


def _reflecting(method: str, handler: Any) -> Any:
    call = guarded_rpc(method, bounded_stream(handler.stream_stream), proxy_guard())
    deserialize = tolerant(handler.request_deserializer, most_bytes_of(method))
    return handler._replace(stream_stream=of_counted_connection(call), request_deserializer=deserialize)


class _Mount:
    """What the generated functions see in place of the server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Done below: the same handlers come a second time, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        streams = {f"/{service}/{name}": bool(handler.response_streaming) for name, handler in handlers.items()}
        read_here = {
            name: handler._replace(
                request_streaming=True,
                response_streaming=True,
                request_deserializer=Weighed(
                    tolerant(handler.request_deserializer, most_bytes_of(f"/{service}/{name}"))
                ),
            )
            for name, handler in handlers.items()
        }
        make_handler, guard = self._server.service_handler_factory, proxy_guard()

        def make_call(service_method: str, streaming_type: gRPCStreamingType) -> ProxiedCall:
            several = streams[service_method]
            kind = gRPCStreamingType.UNARY_STREAM if several else gRPCStreamingType.UNARY_UNARY
            handler = make_handler(service_method, kind)

            def hand_on_to_serve(request: Any, context: Any) -> Any:
                hand_on()
                return handler(request, context)

            call = proxied_call(service_method, hand_on_to_serve, streams=several)
            return of_counted_connection(guarded_rpc(service_method, call, guard, comes_whole=False))

        self._server.service_handler_factory = make_call
        try:
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, read_here),))
            self._server.add_registered_method_handlers(service, read_here)
        finally:
            self._server.service_handler_factory = make_handler
