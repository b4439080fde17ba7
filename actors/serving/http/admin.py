"""Metrics and status on a port of their own, so that whoever may generate need not see them, nor the other way round.

The ingress replica listens there itself, beside Serve's proxies: replicas on one node share the port. What is answered
there is 404 at the proxies then. No proxy stands before it, so it has doors of its own: few connections, of which the
one that has been idle for longest makes room for the next; headers of a few KiB, within a time; turns.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.actors.serving.connections import address_of, peer_of
from outrider.actors.serving.lanes import Lane, LaneFull
from outrider.actors.serving.openai.errors import HttpFailure
from outrider.cluster.limits import LimitsConfig

logger = logging.getLogger("ray.serve.outrider.ingress")

ADMIN_PATHS = frozenset({"/metrics", "/outrider/v1/status"})
"""Here alone."""

PROBE_PATHS = frozenset({"/livez", "/readyz"})
"""Here too."""

MOST_CONNECTIONS = 64
MOST_HEADER_BYTES = 16 << 10

_CAME_IN_HERE = "outrider.admin"


@dataclass(frozen=True)
class AdminAddress:
    host: str
    port: int


def move_to_admin_port(app: FastAPI, address: AdminAddress, limits: LimitsConfig) -> None:
    """The app listens at the address for as long as it lives, for admin paths and probes alone, and takes admin paths
    from nowhere else."""
    app.add_middleware(_NotHere)

    @asynccontextmanager
    async def listening(app: FastAPI) -> AsyncIterator[None]:
        async with _served(_AdminDoor(app, limits), address, limits):
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
    """ASGI app of the admin port. Probes do not wait for scrapes, nor these for each other's crowd."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app = app
        patience_s, per_s = limits.control_timeout_s, limits.max_control_calls_per_s
        places = max(4, int(per_s))
        self._probes = Lane("for health", places, per_s=per_s, patience_s=patience_s)
        self._scrapes = Lane("for status", places, per_s=per_s, patience_s=patience_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ADMIN_PATHS | PROBE_PATHS:
            await _refuse(scope, receive, send)
            return
        lane = self._probes if scope["path"] in PROBE_PATHS else self._scrapes
        client = scope.get("client")
        peer = peer_of(address_of(str(client[0]), 0)) if client else ""
        try:
            await lane.take(peer)
        except LaneFull as full:
            await HttpFailure(429, str(full), headers={"Retry-After": "1"}).response()(scope, receive, send)
            return
        try:
            await self._app({**scope, _CAME_IN_HERE: True}, receive, send)
        finally:
            lane.leave(peer)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        message = f"{scope['method']} {scope['path']}: Not Found"
        await HttpFailure(404, message).response()(scope, receive, send)


class AdminProtocol(H11Protocol):
    """A connection that is hung up on when it is idle for longest of too many, when no request comes in time, and when
    nobody reads its answer. limits: of its server. idle: its server's connections without a request, oldest first."""

    def __init__(self, *args: Any, limits: LimitsConfig, idle: dict[AdminProtocol, None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._idle = limits, idle
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await(self._limits.receive_timeout_s)
        self._idle[self] = None
        if len(self.connections) > MOST_CONNECTIONS:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle.pop(self, None)
            self._forget()

    def on_response_complete(self) -> None:
        """What comes now is a request of which all has to come in time, or what is left of a body that nobody asked
        for, which keeps no connection alive."""
        super().on_response_complete()
        self._idle[self] = None
        if not self.flow.write_paused:
            self._await(self._limits.receive_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await(self._limits.unread_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self in self._idle:
            self._await(self._limits.receive_timeout_s)
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._forget()
        super().connection_lost(exc)

    def _await(self, seconds: float) -> None:
        self._forget()
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


@asynccontextmanager
async def _served(app: Any, address: AdminAddress, limits: LimitsConfig) -> AsyncIterator[None]:
    """Raises OSError when it cannot listen there."""
    listener = socket.create_server(
        (address.host, address.port),
        family=socket.AF_INET6 if ":" in address.host else socket.AF_INET,
        reuse_port=True,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=partial(AdminProtocol, limits=limits, idle={}),  # type: ignore[arg-type]
            ws="none",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
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
