"""The admin port before callers who hold it: its own server, connections and all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from outrider.actors.serving.http.admin import (
    MOST_CONNECTIONS,
    MOST_HEADER_BYTES,
    AdminAddress,
    AdminProtocol,
    move_to_admin_port,
)
from outrider.cluster.limits import LimitsConfig
from outrider.deploy.ports import pick_free_port

HANG_GUARD_S = 60
LARGE = 32 << 20
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    def __init__(self, address: AdminAddress) -> None:
        self._address = address
        self._open: list[Connection] = []

    async def connect(self, data: bytes = b"") -> Connection:
        connection = await asyncio.open_connection(self._address.host, self._address.port, limit=1024)
        self._open.append(connection)
        connection[1].write(data)
        return connection

    async def status(self, path: str = "/livez") -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_GUARD_S) as client:
            return (await client.get(f"http://{self._address.host}:{self._address.port}{path}")).status_code

    def close(self) -> None:
        for _, writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[Port]:
    app = FastAPI()
    for path in ("/livez", "/readyz", "/outrider/v1/status"):
        app.add_api_route(path, lambda: "here")
    app.add_api_route("/metrics", lambda: PlainTextResponse("x" * LARGE))
    address = AdminAddress("127.0.0.1", pick_free_port())
    move_to_admin_port(app, address, LimitsConfig(**limits))
    async with app.router.lifespan_context(app):
        port = Port(address)
        try:
            yield port
        finally:
            port.close()


async def hung_up(connection: Connection) -> bytes:
    """What was said before."""
    said = b""
    with suppress(ConnectionError):  # a reset, where it has not read all that came
        while more := await asyncio.wait_for(connection[0].read(1 << 16), HANG_GUARD_S):
            said += more
    return said


async def test_silent_connections_make_room_for_who_asks() -> None:
    async with serving(receive_timeout_s=3600) as port:
        silent = [await port.connect() for _ in range(3 * MOST_CONNECTIONS)]
        assert await port.status() == 200
        for connection in silent[:MOST_CONNECTIONS]:
            assert await hung_up(connection) == b""
        newest = silent[-1]
        newest[1].write(b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await hung_up(newest)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("said", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nhost: x\r\n"])
async def test_a_header_has_its_time(said: bytes) -> None:
    async with serving(receive_timeout_s=0.2) as port:
        assert await hung_up(await port.connect(said)) == b""


async def test_a_header_has_its_length() -> None:
    async with serving(receive_timeout_s=3600) as port:
        connection = await port.connect(b"GET /livez HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (MOST_HEADER_BYTES + 1024))
        assert (await hung_up(connection)).startswith(b"HTTP/1.1 400")


async def test_a_body_that_trickles_keeps_no_connection() -> None:
    async with serving(receive_timeout_s=0.5) as port:
        _, writer = connection = await port.connect(
            b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        )

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert (await hung_up(connection)).startswith(b"HTTP/1.1 405")
        trickling.cancel()


async def test_who_never_reads_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, connection_lost = asyncio.Event(), AdminProtocol.connection_lost

    def note(protocol: AdminProtocol, error: Exception | None) -> None:
        connection_lost(protocol, error)
        lost.set()

    monkeypatch.setattr(AdminProtocol, "connection_lost", note)
    async with serving(unread_timeout_s=0.5) as port:
        reader, _ = await port.connect(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(lost.wait(), HANG_GUARD_S)
        read = 0
        with suppress(ConnectionError):
            while chunk := await asyncio.wait_for(reader.read(1 << 16), HANG_GUARD_S):
                read += len(chunk)
        assert read < LARGE, "what the kernel held"


async def test_scrapes_have_turns_and_probes_do_not_wait_for_them() -> None:
    async with serving(max_control_calls_per_s=1, control_timeout_s=0.5) as port:
        asked = [asyncio.create_task(port.status("/outrider/v1/status")) for _ in range(12)]
        assert await port.status("/readyz") == 200
        ended = await asyncio.gather(*asked)
        assert set(ended) == {200, 429}


async def test_there_are_no_websockets() -> None:
    async with serving() as port:
        upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        connection = await port.connect(b"GET /ws HTTP/1.1\r\nhost: x\r\n" + upgrade + key)
        assert (await hung_up(connection)).startswith(b"HTTP/1.1 404")
