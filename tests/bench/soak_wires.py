"""Attempts of `tests.bench.soak_attacks` below any call: on connections of their own, what no client library sends."""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.soak_attacks import Hands

HUNG_UP = "hung up"
SHOOK = "shook hands"
AT_ONCE = 50
"""Streams of one rapid reset."""

PIPELINED = 1000
"""Requests of one pipeline."""

_STATUS = b"HTTP/1.1 "
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 1, 3, 4, 7
_END_STREAM, _END_HEADERS, _CANCEL = 1, 4, 8


@cache
def _context(authority: str, protocol: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority)
    context.set_alpn_protocols([protocol])
    return context


@asynccontextmanager
async def _connected(hands: Hands, api: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """After the handshake. Nothing of it is kept, nor waited for, when it is left."""
    context = _context(hands.victim.authority, "h2" if api == "grpc" else "http/1.1")
    host, port = hands.victim.place(api)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost", limit=1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _resets(writer: asyncio.StreamWriter) -> None:
    """Closing sends a reset, whatever there is to be read."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def handshake(hands: Hands) -> str:
    try:
        async with _connected(hands, ("grpc", "http")[next(hands.numbers) % 2]):
            return SHOOK
    except OSError:
        return HUNG_UP


async def reset_after_headers(hands: Hands) -> str:
    try:
        async with _connected(hands, "http") as (_, writer):
            writer.write(hands.head() + b"{")
            await writer.drain()
            _resets(writer)
            return "reset"
    except OSError:
        return HUNG_UP


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    """HPACK: both in clear, not to be remembered."""
    packed = b"\0"
    for text in (name.encode(), value.encode("latin-1")):
        assert len(text) < 127 + 128
        packed += bytes([len(text)]) if len(text) < 127 else bytes([127, len(text) - 127])
        packed += text
    return packed


def _header(hands: Hands, path: str) -> bytes:
    """Of a call."""
    fields = (
        (":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("authorization", f"Bearer {hands.victim.keys['open']}"),
    )  # fmt: skip
    return b"".join(_field(name, value) for name, value in fields)


async def path_of_bytes(hands: Hands) -> str:
    """A call whose path is no text in UTF-8. By its answer's last frame."""
    header = _header(hands, "/outrider.v1.GenerationService/\xff")
    try:
        async with _connected(hands, "grpc") as (reader, writer):
            writer.write(
                _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, header)
            )
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == _HEADERS and head[4] & _END_STREAM:
                    return "no such method" if b"Method not found!" in body else "told"
                if head[3] in (_RST_STREAM, _GOAWAY):
                    return "cut"
    except (OSError, asyncio.IncompleteReadError):
        return HUNG_UP


async def rapid_reset(hands: Hands) -> str:
    """Streams that are opened, and cancelled in the same breath: no number of streams at once is ever reached."""
    block = _header(hands, "/outrider.v1.GenerationService/GenerateStream")
    sent = _PREFACE + _frame(_SETTINGS, 0, 0, b"")
    for stream in itertools.islice(itertools.count(1, 2), AT_ONCE):
        sent += _frame(_HEADERS, _END_HEADERS, stream, block)
        sent += _frame(_RST_STREAM, 0, stream, _CANCEL.to_bytes(4, "big"))
    try:
        async with _connected(hands, "grpc") as (reader, writer):
            writer.write(sent)
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    while True:
                        head = await reader.readexactly(9)
                        await reader.readexactly(int.from_bytes(head[:3], "big"))
                        if head[3] == _GOAWAY:
                            return "sent away"
            return "borne"
    except (OSError, asyncio.IncompleteReadError):
        return HUNG_UP


async def pipeline(hands: Hands) -> str:
    """Requests without a key, all of them before the first is answered."""
    sent = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * PIPELINED
    try:
        async with _connected(hands, "http") as (reader, writer):
            writer.write(sent)
            answers, kept = 0, b""
            while data := await reader.read(1 << 16):
                answers += (kept := kept + data).count(_STATUS)
                if answers == PIPELINED:
                    return "borne"
                kept = kept[1 - len(_STATUS) :]
            return HUNG_UP
    except OSError:
        return HUNG_UP


async def trickle(hands: Hands) -> str:
    """A body in chunks, of which one byte comes each second."""
    head = hands.head(length=0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    try:
        async with _connected(hands, "http") as (reader, writer):
            writer.write(head + b"1\r\n{\r\n")
            answer = asyncio.ensure_future(reader.readline())
            try:
                while not answer.done():
                    await asyncio.wait([answer], timeout=1)
                    writer.write(b"1\r\n \r\n")
                return answer.result()[9:12].decode() or HUNG_UP
            finally:
                answer.cancel()
    except OSError:
        return HUNG_UP
