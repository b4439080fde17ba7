"""Connections to the HTTP door that are held and not used, on a real server: half a header, half a body, no reader."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.actors.serve_seam import http_proxy
from outrider.actors.serve_seam.http_proxy import TimedProtocol
from outrider.actors.serving.gate import Doors
from outrider.actors.serving.http import door
from outrider.actors.serving.http.app import TellCapacity
from outrider.actors.serving.http.door import HttpDoor
from outrider.cluster.limits import LimitsConfig

CAPACITY = 2
PATH = "/v1/completions"
HALF = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{".encode()
CHUNK = "x" * (1 << 16)


@dataclass
class Server:
    port: int
    doors: Doors
    generated: int = 0
    left: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request for an answer."""

    async def generate(self, request: Request) -> Response:
        body = await request.body()
        self.headers.append(dict(request.headers))  # now, when whatever follows a body has come
        if body == b"wait":
            await request.receive()  # what comes behind a body: that the client has left
            self.left += 1
        if body not in (b"flood", b"parts"):
            self.generated += 1
            return JSONResponse({"text": "whole"})

        async def flood() -> AsyncIterator[str]:
            try:
                while True:
                    yield CHUNK
                    await asyncio.sleep(0)
            finally:
                self.left += 1

        async def parts() -> AsyncIterator[str]:
            for part in ("one", "", "two"):
                yield part

        return StreamingResponse(flood() if body == b"flood" else parts())

    async def health(self, request: Request) -> Response:
        return Response()

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        with suppress(ConnectionError):  # it may have been hung up on by now, which is seen by reading
            await writer.drain()
        return reader, writer

    async def status(self, body: bytes = b"{}", path: str = PATH, more: bytes = b"connection: close\r\n") -> int:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
        reader, writer = await self.send(head + more + b"\r\n" + body)
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return int(line.split()[1])


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, **limits: float) -> AsyncIterator[Server]:
    doors = Doors(LimitsConfig(**limits))
    for module in (door, http_proxy):
        monkeypatch.setattr(module, "doors", lambda: doors)
    server = Server(0, doors)
    routes = [Route(PATH, server.generate, methods=["POST"]), Route("/ping", server.health, methods=["POST"])]
    app = HttpDoor(TellCapacity(Starlette(routes=routes), lambda: CAPACITY))
    options = {"lifespan": "off", "log_level": "critical", "timeout_keep_alive": 600}
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, http=TimedProtocol, **options))
    task = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110 - uvicorn's own flag
        await asyncio.sleep(0.01)
    server.port = http.servers[0].sockets[0].getsockname()[1]
    try:
        assert await server.status(path="/ping") == 200  # teaches the capacity
        yield server
    finally:
        http.should_exit = http.force_exit = True
        await task


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side hangs up."""
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""


async def test_four_hundred_half_sent_posts_and_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_awaited_requests=100) as server:
        half = await asyncio.gather(*(server.send(HALF) for _ in range(400)))
        while len(server.doors.awaited) < 100:  # noqa: ASYNC110 - the door's own count
            await asyncio.sleep(0.01)
        assert await server.status() == 200
        assert server.generated == 1
        refused = await asyncio.wait_for(half[0][0].readline(), 60)
        assert refused.split()[1] == b"429"
        for _, writer in half:
            writer.close()


async def test_half_a_body_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, receive_timeout_s=0.3) as server:
        reader, _writer = await server.send(HALF)
        answer = await asyncio.wait_for(reader.read(), 60)  # to the end: it is hung up on
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"limits.receive_timeout_s" in answer
        assert not server.doors.awaited.num_bytes


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", HALF.partition(b"content-length")[0], b"\r\n\r\n"])
async def test_half_a_header_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    async with serving(monkeypatch, receive_timeout_s=0.3) as server:
        reader, _writer = await server.send(data)
        assert await rest(reader) == b""


async def test_nor_is_that_of_a_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, receive_timeout_s=0.3) as server:
        whole = b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        reader, writer = await server.send(whole)
        assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"200"
        await asyncio.sleep(0.6)
        writer.write(whole)
        while b"200" not in await asyncio.wait_for(reader.readline(), 60):
            pass  # a connection that waits between requests is kept
        writer.write(whole[:20])
        assert b"200" not in await rest(reader)


async def test_bodies_on_their_way_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_awaited_bytes=4 << 20) as server:
        large = HALF.replace(b"100\r\n", b"3000000\r\n") + b" " * 2_500_000
        sent = [await server.send(large) for _ in range(3)]
        assert (await asyncio.wait_for(sent[0][0].readline(), 60)).split()[1] == b"429"
        assert server.doors.awaited.num_bytes <= 4 << 20
        assert await server.status() == 200


async def test_who_reads_nothing_loses_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, unread_timeout_s=0.5) as server:
        flood = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nflood".encode()
        unread = [await server.send(flood) for _ in range(CAPACITY)]
        while await server.status() == 429 or server.left < CAPACITY:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await server.status() == 200
        for _, writer in unread:
            writer.close()


def header(num_bytes: int, fields: int = 1) -> bytes:
    """Of so many bytes, without the body that follows."""
    head = f"POST {PATH} HTTP/1.1\r\ncontent-length: 2\r\nconnection: close\r\n".encode()
    each = (num_bytes - len(head) - 2) // fields - len("x: \r\n")
    head += b"".join(b"x: %b\r\n" % (b"x" * each) for _ in range(fields - 1))
    return head + b"x: %b\r\n\r\n" % (b"x" * (num_bytes - len(head) - len("x: \r\n\r\n")))


@pytest.mark.parametrize("fields", [1, 100])
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_header_is_as_long_as_it_may_be_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, fields: int, more: int, at_once: bool
) -> None:
    async with serving(monkeypatch, max_header_bytes=8000) as server:
        data = header(8000 + more, fields)
        assert len(data) == 8000 + more
        reader, writer = await server.send(data + b"{}" if at_once else data[:3000])
        if not at_once:
            await asyncio.sleep(0.05)
            writer.write(data[3000:] + b"{}")
        answer = await rest(reader)
        if more:
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            assert b"the header is longer than 8000 bytes (limits.max_header_bytes)" in answer
            assert b"connection: close" in answer
        else:
            assert answer.startswith(b"HTTP/1.1 200")


async def test_nothing_is_kept_of_a_header_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_header_bytes=8000) as server:
        tracemalloc.start()
        try:
            reader, writer = await server.send(f"POST {PATH} HTTP/1.1\r\nx: ".encode())
            with suppress(ConnectionError):
                for _ in range(64):
                    writer.write(b"x" * (1 << 20))
                    await writer.drain()
            assert b"431" in await rest(reader) or writer.is_closing()
            writer.close()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 8 << 20


@pytest.mark.parametrize("fields", [128, 129])
async def test_a_header_has_so_many_fields(monkeypatch: pytest.MonkeyPatch, fields: int) -> None:
    async with serving(monkeypatch) as server:
        reader, _ = await server.send(header(4000, fields - 2) + b"{}")
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 200" if fields == 128 else b"HTTP/1.1 431")
        assert fields == 128 or b"more than 128 fields" in answer


CHUNKED = f"POST {PATH} HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n".encode()


async def test_what_follows_a_body_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_header_bytes=8000) as server:
        reader, _ = await server.send(CHUNKED + b"authorization: later\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")
        assert server.headers[-1] == {"connection": "close", "transfer-encoding": "chunked"}
        reader, _ = await server.send(CHUNKED + b"x: y\r\n" * 3000)
        assert (await rest(reader)).startswith(b"HTTP/1.1 431")
        assert await server.status() == 200


async def test_a_large_body_in_small_chunks_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, max_header_bytes=1024) as server:
        chunks = b"".join(b"64\r\n%b\r\n" % (b" " * 100) for _ in range(5000))
        reader, _ = await server.send(CHUNKED.removesuffix(b"2\r\n{}\r\n0\r\n") + chunks + b"0\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200")


async def test_a_websocket_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        asked = len(server.headers)
        upgrade = (
            b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        reader, _ = await server.send(upgrade + b"\x81\x05hello")
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"no WebSockets are served here" in answer
        assert len(server.headers) == asked
        assert await server.status() == 200


@pytest.mark.parametrize("length", [b"content-length: 2", b"transfer-encoding: chunked"])
async def test_a_body_behind_an_upgrade_is_refused_and_not_lost(monkeypatch: pytest.MonkeyPatch, length: bytes) -> None:
    """Clients that would rather speak HTTP/2 ask so with their first request."""
    upgrade = b" HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n"
    async with serving(monkeypatch) as server:
        asked = len(server.headers)
        reader, _ = await server.send(b"POST /v1/completions" + upgrade + length + b"\r\n\r\n{}")
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"upgrade: " in answer
        assert len(server.headers) == asked
        reader, _ = await server.send(b"POST /ping" + upgrade + b"content-length: 0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\nhost: x\r\n\r\n",
        CHUNKED.replace(b"2\r\n", b"z\r\n"),
    ],
    ids=["noise", "no path", "no chunk"],
)
async def test_what_is_no_request_is_told_so_in_our_own_form(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    async with serving(monkeypatch) as server:
        reader, _ = await server.send(data)
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["message"].startswith("what was sent is no request of HTTP/1.1; ")


async def test_what_is_no_request_does_not_end_up_in_the_answer_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as server:
        reader, writer = await server.send(
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nflood".encode()
        )
        begun = await asyncio.wait_for(reader.read(1000), 60)
        writer.write(b"\0\1\r\n\r\n")
        answer = begun + await rest(reader)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1
        async with asyncio.timeout(60):
            while not server.left:  # noqa: ASYNC110 - the server's own count
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("body", "whole"), [(b"parts", b"onetwo"), (b"{}", b'{"text":"whole"}')])
async def test_a_client_of_http_1_0_gets_no_chunks(monkeypatch: pytest.MonkeyPatch, body: bytes, whole: bytes) -> None:
    async with serving(monkeypatch) as server:
        head = f"POST {PATH} HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, _ = await server.send(head + body)
        head, _, answer = (await rest(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in head
        assert answer == whole


BEHIND = b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"


async def test_nothing_is_kept_of_a_connection_that_was_reset_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer for its next request held it, over TLS with 256 KiB: a thousand a second were memory for all."""

    def kept() -> int:
        gc.collect()
        # By their types: who is asked for its class may be a module that is imported then.
        return sum(issubclass(type(each), TimedProtocol) for each in gc.get_objects())

    async with serving(monkeypatch) as server, asyncio.timeout(60):
        while len(server.doors.connections["http"]):  # noqa: ASYNC110 - counted by the server itself
            await asyncio.sleep(0.01)
        before = kept()
        for _ in range(3):
            request = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}"
            reader, writer = await server.send(request.encode())
            assert await asyncio.wait_for(reader.readline(), 60) == b"HTTP/1.1 200 OK\r\n"
            reset = struct.pack("ii", 1, 0)  # what is closed is reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            writer.transport.abort()
        while len(server.doors.connections["http"]) or kept() > before:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.01)


async def test_two_requests_at_once_have_an_answer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as server:
        first = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{}}".encode()
        reader, _ = await server.send(first + BEHIND + b"connection: close\r\n\r\n")
        whole, _, empty = (await rest(reader)).partition(b'{"text":"whole"}')
        assert whole.startswith(b"HTTP/1.1 200")
        assert empty.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("body", [b"wait", b"flood"])
@pytest.mark.parametrize("behind", [1, http_proxy.MOST_PIPELINED, http_proxy.MOST_PIPELINED + 1])
async def test_who_leaves_with_requests_behind_is_generated_for_no_more(
    monkeypatch: pytest.MonkeyPatch, body: bytes, behind: int
) -> None:
    """With one too many of them it is hung up on."""
    async with serving(monkeypatch) as server:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await server.send(head + body)
        async with asyncio.timeout(60):
            while len(server.headers) < 1:  # noqa: ASYNC110 - the server's own count
                await asyncio.sleep(0.01)
            writer.write((BEHIND + b"\r\n") * behind)
            if behind > http_proxy.MOST_PIPELINED:
                await rest(reader)
            else:
                await asyncio.sleep(0.1)
                writer.transport.abort()
            while not server.left:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.01)


async def test_who_is_hung_up_on_and_reads_nothing_is_generated_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what has been answered waits for its reader."""
    is_full, pause = asyncio.Event(), TimedProtocol.pause_writing

    def pause_writing(protocol: TimedProtocol) -> None:
        pause(protocol)
        is_full.set()

    monkeypatch.setattr(TimedProtocol, "pause_writing", pause_writing)
    async with serving(monkeypatch, unread_timeout_s=600) as server, asyncio.timeout(60):
        _, writer = await server.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nflood".encode())
        await is_full.wait()
        writer.write((BEHIND + b"\r\n") * (http_proxy.MOST_PIPELINED + 1))
        while not server.left:  # noqa: ASYNC110 - the server's own count
            await asyncio.sleep(0.01)
        writer.transport.abort()
