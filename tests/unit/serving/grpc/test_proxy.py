"""What Serve's proxies are made to do where they have no option."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from ray.serve._private import default_impl
from ray.serve._private.proxy_request_response import gRPCProxyRequest

from outrider.actors.serve_adapter import proxy


def test_a_client_s_address_is_known_when_its_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve logs it then. To ask gRPC itself for it ends the process once the client has left."""
    monkeypatch.setattr(gRPCProxyRequest, "client", gRPCProxyRequest.client)  # what `middlewares` sets is undone
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    monkeypatch.setattr(proxy, "DEFAULT_GRPC_SERVER_OPTIONS", [])
    proxy.middlewares()
    requests: list[gRPCProxyRequest] = []

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> None:
        requests.append(gRPCProxyRequest(request, context, "/a.Service/Stream", True))
        await context.write(b"")
        await asyncio.Event().wait()

    async def leave() -> None:
        server = grpc.aio.server()
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream("/a.Service/Stream")(b"")
            await call.read()
            call.cancel()
        await server.stop(None)

    asyncio.run(leave())
    assert requests[0].client.startswith("127.0.0.1:")
