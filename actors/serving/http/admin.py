"""Metrics and status on a port of their own, so that whoever may generate need not see them, nor the other way round.

The ingress replica listens there itself, beside Serve's proxies: replicas on one node share the port. What is answered
there is 404 at the proxies then.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.actors.serving.openai.errors import HttpFailure

logger = logging.getLogger("ray.serve.outrider.ingress")

ADMIN_PATHS = frozenset({"/metrics", "/outrider/v1/status"})
"""Here alone."""

PROBE_PATHS = frozenset({"/livez", "/readyz"})
"""Here too."""

_CAME_IN_HERE = "outrider.admin"


@dataclass(frozen=True)
class AdminAddress:
    host: str
    port: int


def move_to_admin_port(app: FastAPI, address: AdminAddress) -> None:
    """The app listens at the address for as long as it lives, for admin paths and probes alone, and takes admin paths
    from nowhere else."""
    app.add_middleware(_NotHere)

    @asynccontextmanager
    async def listening(app: FastAPI) -> AsyncIterator[None]:
        async with _served(_AdminDoor(app), address):
            yield

    app.router.lifespan_context = listening


class _NotHere:
    """ASGI middleware: admin paths do not exist, but for the admin port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in ADMIN_PATHS and _CAME_IN_HERE not in scope:
            await _refuse(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _AdminDoor:
    """ASGI app of the admin port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ADMIN_PATHS | PROBE_PATHS:
            await _refuse(scope, receive, send)
        else:
            await self._app({**scope, _CAME_IN_HERE: True}, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        message = f"{scope['method']} {scope['path']}: Not Found"
        await HttpFailure(404, message).response()(scope, receive, send)


@asynccontextmanager
async def _served(app: Any, address: AdminAddress) -> AsyncIterator[None]:
    """Raises OSError when it cannot listen there."""
    listener = socket.create_server(
        (address.host, address.port),
        family=socket.AF_INET6 if ":" in address.host else socket.AF_INET,
        reuse_port=True,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve([listener]))
    logger.info("metrics and status at %s:%d", address.host, address.port)
    try:
        yield
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving
        listener.close()
