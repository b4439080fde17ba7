"""``python -m tests.bench.access_cost``: what keys, TLS and links' MACs take of a round, and of a request.

Each part is measured by itself: keys on the ingress' own guard, TLS on real servers whose handlers do nothing but send
a message now and then, as rounds do, MACs on a round's frames, written, sealed and checked again. Sides take turns, and
the medians of their turns are compared: in processor time of this process, both ends together, which another program on
the machine does not stretch as it does the clock's. What is compared with is a round of ROUND_MS milliseconds of one
core, and a request of TOKENS tokens all of whose drafts were right: the fewest rounds, so that what is paid once weighs
most.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from outrider.actors.serve_seam.listening import bind_grpc
from outrider.actors.serving.access.guard import GRPC_CALLS, Asked, Guard, Refused
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.actors.serving.access.process import guard_ingress, ingress_guard
from outrider.actors.serving.access.tls import reloading_certificates
from outrider.cluster.link.authentication import SealedTransport
from outrider.cluster.link.codec import frame_capacity_words, pack
from outrider.cluster.link.frame import FrameKind, decode, encode
from outrider.cluster.link.messages import Commit, Message, Proposals, SparseQ
from tests.bench.machine import machine
from tests.certificates import Authority

METHOD = "/outrider.v1.GenerationService/Generate"
ROUND_MS, TOKENS = 25.0, 64
K, TOP_N = 4, 64
FRAME_ROUNDS, FRAME_TURNS = 20, 400
GOAL = 0.01
"""Of a round."""

BATCHES = (1, 8, 32)
APIS = ("gRPC", "HTTP")
MESSAGES, MESSAGE = 64, b"m" * 160
"""Of one answer, and about as long as a round's."""

ALL, ONE = b"a" * 200, b"1" * 200
"""Requests: for MESSAGES messages, and for one."""

PAUSE_S = 0.002
"""Between two of them: each is a record and a system call of its own, as in rounds."""


def guard_of(number: int, directory: str) -> tuple[Guard, str]:
    """The ingress', with metrics, and the last one's secret."""
    secrets = [new_secret() for _ in range(number)]
    keys = [
        Key(
            name=f"k{n}", hash=hash_of(secret.encode()), scopes=("generate",), requests_per_minute=10**9,
            tokens_per_minute=10**9,
        )
        for n, secret in enumerate(secrets)
    ]  # fmt: skip
    path = Path(directory) / f"{number}.yaml"
    path.touch(mode=0o600)
    path.write_text("".join(map(as_entry, keys)))
    guard_ingress(str(path))
    guard = ingress_guard()
    assert guard is not None
    return guard, secrets[-1]


def check_us(guard: Guard, header: str, times: int = 20_000) -> float:
    asked = Asked("grpc", METHOD, header, "peer", GRPC_CALLS[METHOD])
    begun = time.process_time()
    for _ in range(times):
        try:
            with guard.admit(asked):
                pass
        except Refused:
            pass
    return (time.process_time() - begun) / times * 1e6


def count_us(guard: Guard, header: str, times: int = 20_000) -> float:
    """What a message's tokens are counted with."""
    with guard.admit(Asked("grpc", METHOD, header, "peer", GRPC_CALLS[METHOD])) as caller:
        assert caller is not None
        begun = time.process_time()
        for _ in range(times):
            caller.used(0, 3)
        return (time.process_time() - begun) / times * 1e6


class Side(ABC):
    """A server and a client of it, with TLS or without."""

    def __init__(self, certificates: Any, authority: bytes) -> None:
        """certificates: as its server takes them; None: plain text. authority: that signed them, PEM."""
        self._certificates, self._authority = certificates, authority

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    async def stream(self) -> None:
        """One request, and MESSAGES messages in answer."""

    @abstractmethod
    async def connect(self) -> None:
        """A connection of its own, and one message over it."""

    async def message_us(self) -> float:
        begun = time.process_time()
        await self.stream()
        return (time.process_time() - begun) / MESSAGES * 1e6

    async def connection_us(self) -> float:
        begun = time.process_time()
        await self.connect()
        return (time.process_time() - begun) * 1e6


class GrpcSide(Side):
    async def start(self) -> None:
        async def stream(requests: Any, context: Any) -> None:
            for _ in range(MESSAGES if await anext(aiter(requests)) == ALL else 1):
                await context.write(MESSAGE)
                await asyncio.sleep(PAUSE_S)

        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(stream)
        service = grpc.method_handlers_generic_handler("outrider.v1.GenerationService", {"Generate": handler})
        self._server.add_generic_rpc_handlers((service,))
        self._port = bind_grpc(self._server, "127.0.0.1", 0, self._certificates)
        await self._server.start()
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if self._certificates is None:
            return grpc.aio.insecure_channel(f"localhost:{self._port}", options)
        credentials = grpc.ssl_channel_credentials(self._authority)
        return grpc.aio.secure_channel(f"localhost:{self._port}", credentials, options)

    async def stop(self) -> None:
        await self._channel.close()
        await self._server.stop(0)

    async def stream(self) -> None:
        async for _ in self._channel.stream_stream(METHOD)(iter([ALL])):
            pass

    async def connect(self) -> None:
        async with self._open() as channel:
            async for _ in channel.stream_stream(METHOD)(iter([ONE])):
                pass


class HttpSide(Side):
    """asyncio's streams, which are what uvicorn's connections are made of."""

    async def start(self) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):  # its client has hung up
                while request := await reader.read(len(ALL)):
                    for _ in range(MESSAGES if request == ALL else 1):
                        writer.write(MESSAGE)
                        await writer.drain()
                        await asyncio.sleep(PAUSE_S)
            await _close(writer)

        context = None
        if self._certificates is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._certificates)
        self._server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        self._port = self._server.sockets[0].getsockname()[1]
        self._connection = await self._open()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cadata=self._authority.decode()) if self._certificates else None
        return await asyncio.open_connection("localhost", self._port, ssl=context)

    async def stop(self) -> None:
        await _close(self._connection[1])
        self._server.close()
        await self._server.wait_closed()

    async def stream(self) -> None:
        reader, writer = self._connection
        writer.write(ALL)
        await reader.readexactly(MESSAGES * len(MESSAGE))

    async def connect(self) -> None:
        reader, writer = await self._open()
        writer.write(ONE)
        await reader.readexactly(len(MESSAGE))
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


async def tls_us(turns: int) -> dict[str, float]:
    """What TLS adds to a message and to a connection, by API."""
    authority = Authority()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        certificate, key = authority.sign().write(Path(directory), "server")
        files = str(certificate), str(key)
        sides: dict[str, tuple[Side, Side]] = {
            "gRPC": (GrpcSide(None, b""), GrpcSide(reloading_certificates(*files), authority.certificate)),
            "HTTP": (HttpSide(None, b""), HttpSide(files, authority.certificate)),
        }
        for api, pair in sides.items():
            for side in pair:
                await side.start()
                await side.message_us()
                await side.connection_us()
            messages = [[await side.message_us() for side in pair] for _ in range(turns)]
            connections = [[await side.connection_us() for side in pair] for _ in range(turns)]
            for side in pair:
                await side.stop()
            for what, taken in (("message", messages), ("connection", connections)):
                found[f"{api} {what}"] = statistics.median(secure - plain for plain, secure in taken)
                found[f"{api} {what}, without"] = statistics.median(plain for plain, _ in taken)
    return found


@dataclass(frozen=True)
class Part:
    """What one of them adds, in microseconds of processor time. request_us: once a request; round_us: to each round of
    a batch."""

    name: str
    batch: int
    round_us: float
    request_us: float = 0.0

    @property
    def share_of_round(self) -> float:
        return self.round_us / (ROUND_MS * 1000)

    @property
    def share_of_request(self) -> float:
        """Of one core, for as long as the request's rounds take. Its own share of what its batch pays together."""
        rounds = -(-TOKENS // (K + 1))
        return (self.request_us + rounds * self.round_us / self.batch) / (rounds * ROUND_MS * 1000)


class Wire:
    """Hands over what was sent last."""

    def __init__(self) -> None:
        self.sent = np.empty(0, dtype=np.int32)

    def start_send(self, buffer: np.ndarray) -> Callable[[], None]:
        self.sent = buffer
        return lambda: None

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        buffer[:] = self.sent

    def abort(self) -> None: ...


def frames_us(payloads: list[np.ndarray], capacity: int, sealed: bool) -> float:
    near = far = Wire()
    if sealed:
        keys = {"send_key": bytes(32), "receive_key": bytes(32)}
        near, far = SealedTransport(near, **keys), SealedTransport(far, **keys)  # type: ignore[assignment]
    out, into = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    sequence = 0
    started = time.process_time()
    for _ in range(FRAME_ROUNDS):
        for payload in payloads:
            encode(out, epoch=1, sequence=sequence, kind=FrameKind.DATA, payload=payload)
            near.start_send(out)
            far.recv(into, 1.0)
            decode(into, 1, sequence)
            sequence += 1
    return (time.process_time() - started) / FRAME_ROUNDS * 1e6


def messages(batch: int, top_n: int) -> tuple[list[Message], list[Message]]:
    q = None
    if top_n:
        q = SparseQ(np.tile(np.arange(top_n, dtype=np.int32), (K, 1)), np.full((K, top_n), 1 / top_n, np.float32))
    commits: list[Message] = [Commit(one, 100, [1, 2, 3], K, K) for one in range(batch)]
    return commits, [Proposals(one, 103, [1] * K, q=q) for one in range(batch)]


@dataclass(frozen=True)
class MacCost:
    """Of one round. plain_us, sealed_us: processor time, both ends together."""

    num_bytes: int
    plain_us: float
    sealed_us: float

    @property
    def added_us(self) -> float:
        return self.sealed_us - self.plain_us


def mac_cost(batch: int, top_n: int) -> MacCost:
    """Of so many requests, whose drafts come with q of top_n tokens a position."""
    capacity = frame_capacity_words(batch, K, TOP_N)
    payloads = [payload for part in messages(batch, top_n) for payload in pack(part, capacity)]
    taken = [(frames_us(payloads, capacity, False), frames_us(payloads, capacity, True)) for _ in range(FRAME_TURNS)]
    plain, sealed = (min(turn[side] for turn in taken) for side in (0, 1))
    return MacCost(sum(4 * len(payload) for payload in payloads), plain, sealed)


def parts(check: float, count: float, tls: dict[str, float], macs: dict[tuple[int, int], MacCost]) -> list[Part]:
    """check, count: of a key, at one place; macs: by batch and tokens of q."""
    found = []
    for batch in BATCHES:
        # The proxy looks at a key, and the ingress again; TLS has the request's message besides the rounds'.
        found.append(Part("keys", batch, batch * count, 2 * check))
        found += [Part(f"TLS, {api}", batch, batch * tls[f"{api} message"], tls[f"{api} message"]) for api in APIS]
        for top_n in (0, TOP_N):
            name = f"MAC, q of {top_n} tokens" if top_n else "MAC, drafts without q"
            found.append(Part(name, batch, macs[batch, top_n].added_us))
    return found


def table(rows: list[Part]) -> Iterator[str]:
    head = f"{'part':22} {'batch':>5} {'a round':>10} {f'of {ROUND_MS:g} ms':>9}"
    yield f"{head} {'a request':>10} {f'of {TOKENS} tokens':>13}"
    for part in rows:
        mark = "" if part.share_of_round <= GOAL else "  more than the goal"
        yield (
            f"{part.name:22} {part.batch:5} {part.round_us:7.1f} us {part.share_of_round:8.3%} "
            f"{part.request_us:7.1f} us {part.share_of_request:13.3%}{mark}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=200, help="answers, and connections, of each side")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # a wrong key a microsecond is a line each
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        few = guard_of(1, directory)
        check_of_one = check_us(few[0], f"Bearer {few[1]}")
        guard, secret = guard_of(1000, directory)
        header = f"Bearer {secret}"
        check, count = check_us(guard, header), count_us(guard, header)
        wrong = check_us(guard, "Bearer outrider_wrong")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray's actors have it
        tls = runner.run(tls_us(args.turns))
    macs = {(batch, top_n): mac_cost(batch, top_n) for batch in BATCHES for top_n in (0, TOP_N)}
    print(f"a key, of 1,000: {check:.1f} us; of 1: {check_of_one:.1f}; a wrong one: {wrong:.1f}; counting: {count:.2f}")
    for name, value in tls.items():
        print(f"TLS, {name}: {value:.1f} us")
    for (batch, top_n), of in macs.items():
        ratio = of.sealed_us / of.plain_us
        print(
            f"frames of {batch} requests, q of {top_n} tokens: {of.num_bytes} bytes, sealed {ratio:.2f} times as long"
        )
    print()
    for line in table(parts(check, count, tls, macs)):
        print(line)


if __name__ == "__main__":
    main()
