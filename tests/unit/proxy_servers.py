"""Both servers of one of Serve's proxies, started by Serve's own functions in this process and configured as there, by
its environment. Scripted handlers are where Serve's and the ingress would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc._cython import cygrpc
from ray.serve._private import constants, default_impl, http_util
from ray.serve._private.grpc_util import start_grpc_server
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http import auto

from outrider.actors.serve_seam import grpc_proxy, http_proxy
from outrider.actors.serve_seam.options import proxy_options
from outrider.actors.serving.access.process import proxy_guard
from outrider.actors.serving.access.settings import ProxyAccess, proxy_access
from outrider.actors.serving.gate import Doors, doors
from outrider.cluster.config import ServingConfig
from outrider.cluster.limits import LimitsConfig
from outrider.deploy.ports import pick_free_port
from tests.unit.scripted_proxy import Proxy

_OF_A_PROCESS = (doors, proxy_access, proxy_guard)


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


@asynccontextmanager
async def proxy_servers(
    monkeypatch: pytest.MonkeyPatch, limits: LimitsConfig | None = None, proxy: Proxy | None = None, **settings: Any
) -> AsyncIterator[tuple[ServingConfig, Doors]]:
    """settings: keys of ``serving``. What Serve's modules are changed to for it, they are not afterwards."""
    limits = limits or LimitsConfig()
    serving = ServingConfig(grpc_port=pick_free_port(), http_port=pick_free_port(), **settings)
    with monkeypatch.context() as patch:
        for name, value in {**ProxyAccess.of(serving).environment(), **limits.to_environment()}.items():
            patch.setenv(name, value)
        for module, name in (
            (default_impl, "add_grpc_address"),
            (http_util, "uvicorn"),
            (auto, "AutoHTTPProtocol"),
            (grpc_proxy, "_limited"),
            (cygrpc, "AioServer"),
        ):
            patch.setattr(module, name, getattr(module, name))
        server_options = list(constants.DEFAULT_GRPC_SERVER_OPTIONS)
        for cached in _OF_A_PROCESS:
            cached.cache_clear()
        try:
            app: Any = _hello
            for middleware in http_proxy.middlewares():  # the last is the first that a request meets
                app = middleware.cls(app, *middleware.args, **middleware.kwargs)
            loop, options = asyncio.get_running_loop(), proxy_options(serving, limits)
            http_task, http = await http_util.start_asgi_http_server(app, options["http_options"], event_loop=loop)
            make_handler = (proxy or Proxy()).make_handler
            grpc_task, grpc = await start_grpc_server(make_handler, options["grpc_options"], event_loop=loop)
            try:
                while not (http.started or http_task.done()):  # noqa: ASYNC110 - uvicorn's own flag
                    await asyncio.sleep(0.01)
                yield serving, doors()
            finally:
                http.should_exit = http.force_exit = True
                await http_task
                await grpc.stop(None)
                await grpc_task
        finally:
            constants.DEFAULT_GRPC_SERVER_OPTIONS[:] = server_options
            for cached in _OF_A_PROCESS:
                cached.cache_clear()
