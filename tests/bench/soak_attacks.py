"""The attackers of `tests.bench.soak`: what docs/security.md lists that a client can do from outside, at paced rates.

Run by the soak as ``python -m tests.bench.soak_attacks CREW``: a process of its own, nice 19, which attacks from a line
``go`` on its stdin (``go ROW; ROW``: with these alone) to a line ``stop``, and then prints how its attempts ended, as
JSON: {attack: {ending: number}}. An ending is a gRPC status, an HTTP status, ``hung up``, or ``held``: open still when
it was told to stop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import Any, Self

import grpc
import httpx
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from outrider.v1 import generation_pb2 as pb
from tests.bench.soak_wires import (
    HUNG_UP,
    handshake,
    path_of_bytes,
    pipeline,
    rapid_reset,
    reset_after_headers,
    trickle,
)
from tests.security.test_doors import BODIES, MESSAGES
from tests.security.test_hostile_constraints import SLOW

UNMEANT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
HELD = "held"
PATIENCE_S = 25.0
MIB = 1 << 20
SERVICE = "/outrider.v1.GenerationService/"
COMPLETIONS = "/v1/completions"
UNREAD_S = 9.0
"""How long a reader who never reads looks away before it asks what became of its answer."""


@dataclass(frozen=True)
class Victim:
    """Where the server is, and the attackers' keys. They are good ones: what a key stops is easy to stop.

    keys: ``open`` has no limits, ``glutton`` those that an operator gives to who sends real work, ``old`` has expired,
    ``ops`` may ask for status alone. names: request ids of others' requests, to be ended.
    """

    grpc: str
    http: str
    authority: str
    keys: dict[str, str]
    names: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(**json.loads(text))

    @cached_property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority.encode())

    @cached_property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority)

    def place(self, api: str) -> tuple[str, int]:
        host, port = (self.grpc if api == "grpc" else self.http).rsplit(":", 1)
        return host, int(port)


class Hands:
    """What an attack is done with. attempts are numbered, so that nothing is remembered from the last."""

    def __init__(self, victim: Victim) -> None:
        self.victim = victim
        self.numbers = itertools.count(random.getrandbits(40))
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
        options += [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self._options = options
        self._channels = [self._channel() for _ in range(2)]  # one with what is held, one with what is sent
        self._http = httpx.AsyncClient(verify=victim.context, trust_env=False, timeout=PATIENCE_S)

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self.victim.grpc, self.victim.credentials, options=self._options)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(0)
        await self._http.aclose()

    def _metadata(self, key: str | None) -> tuple[tuple[str, str], ...]:
        secret = self.victim.keys.get(key, key) if key else None
        return (("authorization", f"Bearer {secret}"),) if secret else ()

    async def call(
        self,
        rpc: str,
        message: bytes | Message | None = b"",
        key: str | None = "open",
        unread_s: float = 0.0,
        timeout_s: float | None = PATIENCE_S,
        gzip: bool = False,
    ) -> str:
        """message None: none ever comes. unread_s: so long nothing is read."""
        method = rpc if rpc.startswith("/") else SERVICE + rpc
        channel = self._channels[0 if message is None or unread_s or method.endswith("Watch") else 1]
        compression = grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression
        options = {"metadata": self._metadata(key), "timeout": timeout_s, "compression": compression}
        if message is None:
            stream = channel.stream_stream(method)(_silence(), **options)
        else:
            sent = message.SerializeToString() if isinstance(message, Message) else message
            stream = channel.unary_stream(method)(sent, **options)
        try:
            if unread_s:
                await asyncio.sleep(unread_s)
            async for _ in stream:
                pass
        except grpc.aio.AioRpcError as error:
            code = error.code()
            # Codes that nobody should see: the table tells what they say.
            return f"{code.name}: {error.details()}"[:120] if code in UNMEANT else code.name
        finally:
            stream.cancel()
        return "OK"

    async def ask(
        self, path: str, body: Any = None, key: str | None = "open", content: Any = None, **headers: str
    ) -> str:
        """A POST of body as JSON, or of content; a GET without either."""
        sent = dict(self._metadata(key))
        if body is not None:
            content = json.dumps(body, separators=(",", ":")).encode()
        if content is not None:
            sent["content-type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        method = "GET" if content is None else "POST"
        url = f"https://{self.victim.http}{path}"
        try:
            request = self._http.build_request(method, url, content=content, headers=sent)
            if not sent.get("content-type", "?"):
                del request.headers["content-type"]
            return str((await self._http.send(request)).status_code)
        except httpx.TimeoutException:
            return "no answer"
        except httpx.HTTPError:
            return HUNG_UP

    async def send(
        self, data: bytes, api: str = "http", *, tls: bool = True, until_s: float = 600.0, unread_s: float = 0.0
    ) -> str:
        """data alone, on a connection of its own; how the other side ends it."""
        plain = socket.socket()
        plain.setblocking(False)
        if unread_s:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(plain, self.victim.place(api))
        except BaseException as error:
            plain.close()
            if isinstance(error, OSError):
                return HUNG_UP
            raise
        context = self.victim.context if tls else None
        writer = None
        try:  # the socket is the transport's from here on
            reader, writer = await asyncio.open_connection(
                sock=plain, ssl=context, server_hostname="localhost" if tls else None, limit=1024
            )
            writer.write(data)
            await writer.drain()
            if unread_s:
                await asyncio.sleep(unread_s)
            async with asyncio.timeout(until_s):
                return _status(await reader.read(-1 if unread_s else 64), whole=bool(unread_s))
        except TimeoutError:
            return "no answer"
        except OSError:
            return HUNG_UP
        finally:
            if writer is not None:
                writer.transport.abort()

    def head(self, path: str = COMPLETIONS, key: str | None = "open", length: int = 99) -> bytes:
        """Of a POST."""
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self._metadata(key)]
        return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def _status(answer: bytes, *, whole: bool) -> str:
    """whole: all of the answer should be there."""
    if not answer.startswith(b"HTTP/1.1 "):
        return HUNG_UP
    status = answer[9:12].decode()
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    if whole and (length is not None and len(body) < length):
        return f"{status}, cut"
    return status


Attempt = Callable[[Hands], Awaitable[str]]


@dataclass(frozen=True)
class Attack:
    """row: of the table in docs/security.md, in a few words. every_s: between two attempts; at_once: under way at a
    time, after which the next waits for one to end."""

    name: str
    row: str
    every_s: float
    at_once: int
    attempt: Attempt


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParameters(**sampling))


def constraint(row: str, bomb: str, every_s: float, **spec: Any) -> Attack:
    """With a number in it: what was compiled once is remembered."""

    def build(hands: Hands) -> pb.GenerateRequest:
        number, ((kind, given),) = next(hands.numbers), spec.items()
        if kind == "json_schema":
            kind, given = "json", json.dumps({"title": str(number), **given})
        else:
            given = f"{given}# {number}\n" if kind == "grammar" else f"{number}|{given}"
        sampling = pb.SamplingParameters(
            temperature=0,
            max_tokens=200,
            structured_outputs=pb.StructuredOutputs(**{kind: given}),
        )
        return pb.GenerateRequest(text="hello", sampling=sampling)

    return Attack(bomb, row, every_s, 2, lambda hands: hands.call("Generate", build(hands)))


@cache
def body(name: str) -> bytes:
    return json.dumps(BODIES[name](), separators=(",", ":")).encode()


@cache
def message(name: str) -> bytes:
    return MESSAGES[name]()


def post(row: str, name: str, every_s: float = 10.0) -> Attack:
    return Attack(f"HTTP: {name}", row, every_s, 1, lambda hands: hands.ask(COMPLETIONS, content=body(name)))


def send_message(row: str, name: str, every_s: float = 10.0, gzip: bool = False) -> Attack:
    told = f"gRPC: {name}{', compressed' if gzip else ''}"
    return Attack(told, row, every_s, 1, lambda hands: hands.call("Generate", message(name), gzip=gzip))


async def flood(hands: Hands) -> str:
    return await hands.call("Generate", request(temperature=1, n=64, max_tokens=32, ignore_eos=True), "glutton")


async def endless(hands: Hands) -> str:
    return await hands.call("GenerateStream", request(temperature=1, ignore_eos=True), "glutton", timeout_s=None)


async def end_anothers(hands: Hands) -> str:
    name = random.choice(hands.victim.names)
    return await hands.call("AbortRequest", pb.AbortRequestRequest(request_id=name))


async def endless_body(hands: Hands) -> str:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * MIB

    return await hands.ask(COMPLETIONS, content=body())


LONG_PROMPT = pb.GenerateRequest(
    text="x" * 900, sampling=pb.SamplingParameters(temperature=0, max_tokens=1, logprobs=20, prompt_logprobs=20)
)
UNREAD_BODY = json.dumps({"prompt": "x" * 900, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 20}).encode()
UNREAD_STREAM = pb.GenerateStreamRequest.FromString(LONG_PROMPT.SerializeToString())
WATCH, CHECK = "/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest()
STATUS = pb.GetServerStatusRequest()

IDLE = "silent streams, half-sent requests"
UNREAD = "readers who never read"
POLLS = "status pollers, Watch streams"
SIZES = "compressed, long, many-valued"
VALUES = "lists of wrong values"
TOKENS = "tokenise bombs"
VALID_TOKENS = "valid tokenise floods"
HANDSHAKES = "handshake floods, resets"
PIPELINES = "pipelined requests"
HEADERS = "header floods, WebSocket upgrades"
TRICKLES = "chunked bodies that trickle"
MANY_FIELDS = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 100) for number in range(10_000))
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TOKENISED = b'{"prompt": "' + b"x" * (7 * MIB) + b'"}'

FLOODS = "n = 64, no deadline, endless"
GRAMMARS = "grammar bombs"
SCHEMAS = "wide and large schemas"
REGEXES = "huge regexes"
BOMB = 'root ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= root [a-z ]\n'
"""Its masks take minutes: refused with serving.structured_output = json."""

KEYS = "no key, wrong keys"
WIRES = "plain text on the TLS port"
PAGES = "foreign Host and Origin, typeless blobs"

CREWS: dict[str, list[Attack]] = {
    "idlers": [
        Attack("silent gRPC streams", IDLE, 0.1, 100, lambda h: h.call("GenerateStream", None, timeout_s=None)),
        Attack("half-sent POSTs", IDLE, 0.2, 100, lambda h: h.send(h.head() + b"{")),
        Attack("half-sent headers", IDLE, 0.2, 100, lambda h: h.send(h.head()[:40])),
        Attack("half-sent POSTs without a key", IDLE, 1.0, 100, lambda h: h.send(h.head(key=None) + b"{")),
        Attack("connections that say nothing, HTTP", IDLE, 0.5, 50, lambda h: h.send(b"", tls=False)),
        Attack("connections that say nothing, gRPC", IDLE, 0.5, 50, lambda h: h.send(b"", "grpc", tls=False)),
        Attack(
            "unread gRPC streams", UNREAD, 15.0, 4,
            lambda h: h.call("GenerateStream", UNREAD_STREAM, unread_s=UNREAD_S),
        ),
        Attack("unread gRPC answers", UNREAD, 15.0, 4, lambda h: h.call("Generate", LONG_PROMPT, unread_s=UNREAD_S)),
        Attack(
            "unread HTTP answers", UNREAD, 15.0, 4,
            lambda h: h.send(h.head(length=len(UNREAD_BODY)) + UNREAD_BODY, unread_s=UNREAD_S),
        ),
        Attack("status pollers, gRPC", POLLS, 0.1, 100, lambda h: h.call("GetServerStatus", STATUS)),
        Attack("status pollers, HTTP", POLLS, 0.2, 100, lambda h: h.ask("/outrider/v1/status")),
        Attack("Watch streams", POLLS, 0.1, 300, lambda h: h.call(WATCH, CHECK, timeout_s=None)),
    ],
    "bombers": [
        send_message(SIZES, "zeros", gzip=True),
        send_message(SIZES, "zeros"),
        send_message(SIZES, "messages"),
        send_message(SIZES, "stop strings"),
        send_message(SIZES, "a bad word"),
        Attack("gRPC: bytes that are no message", SIZES, 1, 1, lambda h: h.call("Generate", b"\xff" * 100)),
        Attack("HTTP: a Content-Length of 1 GiB", SIZES, 1, 4, lambda h: h.send(h.head(length=1 << 30) + b"{")),
        Attack("HTTP: 9 MiB", SIZES, 10, 1, lambda h: h.ask(COMPLETIONS, content=b" " * (9 * MIB))),
        Attack("HTTP: a body without an end", SIZES, 10, 1, endless_body),
        Attack("HTTP: 7 Mi brackets", SIZES, 10, 1, lambda h: h.ask(COMPLETIONS, content=b"[" * (7 * MIB))),
        post(SIZES, "empty lists"),
        post(SIZES, "stop strings"),
        post(SIZES, "a bad word"),
        post(VALUES, "wrong values"),
        post(VALUES, "wrong values within the limit"),
        Attack("7 MiB to tokenise, HTTP", TOKENS, 15, 1, lambda h: h.ask("/tokenize", content=TOKENISED)),
        Attack("7 MiB to tokenise, gRPC", TOKENS, 15, 1,
               lambda h: h.call("Tokenize", pb.TokenizeRequest(text="x" * (7 * MIB)))),
        Attack("130,000 ids to detokenise", TOKENS, 15, 1,
               lambda h: h.call("Detokenize", pb.DetokenizeRequest(token_ids=[65] * 130_000))),
        Attack("a million ids to detokenise", TOKENS, 8, 1,
               lambda h: h.call("Detokenize", pb.DetokenizeRequest(token_ids=[65] * 1_000_000))),
        Attack("900 characters to tokenise, HTTP", VALID_TOKENS, 0.2, 10,
               lambda h: h.ask("/tokenize", {"prompt": "x" * 900})),
        Attack("900 characters to tokenise, gRPC", VALID_TOKENS, 0.2, 10,
               lambda h: h.call("Tokenize", pb.TokenizeRequest(text="x" * 900))),
        Attack("handshakes, and no more", HANDSHAKES, 0.1, 20, handshake),
        Attack("resets after a header", HANDSHAKES, 0.2, 20, reset_after_headers),
        Attack("streams opened and cancelled at once", HANDSHAKES, 1, 4, rapid_reset),
        Attack("paths that are no text", HEADERS, 1, 4, path_of_bytes),
        Attack("a thousand requests in one go", PIPELINES, 0.5, 4, pipeline),
        Attack("headers of a megabyte", HEADERS, 1, 4, lambda h: h.send(h.head()[:-2] + MANY_FIELDS)),
        Attack("gRPC metadata of 64 KiB", HEADERS, 1, 4, lambda h: h.call("Generate", request(), "x" * (64 << 10))),
        Attack("WebSocket upgrades", HEADERS, 0.5, 10, lambda h: h.send(UPGRADE)),
        Attack("bodies that trickle", TRICKLES, 0.5, 40, trickle),
    ],
    "callers": [
        constraint(GRAMMARS, "grammar of 80 bytes", 15, grammar=BOMB),
        constraint(SCHEMAS, "optional properties", 30, json_schema=SLOW),
        constraint(REGEXES, "regex of 2 MB", 10, regex="(a|b)" * 400_000),
        Attack("64 answers at once", FLOODS, 0.2, 20, flood),
        Attack("no deadline, no end", FLOODS, 1, 20, endless),
        Attack("no key, gRPC", KEYS, 0.2, 20, lambda h: h.call("Generate", request(max_tokens=4), None)),
        Attack("a wrong key, gRPC", KEYS, 0.2, 20, lambda h: h.call("Generate", request(max_tokens=4), "outrider_x")),
        Attack("an expired key, gRPC", KEYS, 1, 20, lambda h: h.call("Generate", request(max_tokens=4), "old")),
        Attack("a key without the scope, gRPC", KEYS, 1, 20, lambda h: h.call("Generate", request(), "ops")),
        Attack("no key, HTTP", KEYS, 0.5, 20, lambda h: h.ask(COMPLETIONS, {"prompt": "x"}, None)),
        Attack("a wrong key, HTTP", KEYS, 0.5, 20, lambda h: h.ask(COMPLETIONS, {"prompt": "x"}, "outrider_x")),
        Attack("metrics without the scope", KEYS, 1, 20, lambda h: h.ask("/metrics", key="glutton")),
        Attack("ending others' requests", KEYS, 0.5, 20, end_anothers),
        Attack("plain text, gRPC", WIRES, 0.5, 20,
               lambda h: h.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "grpc", tls=False)),
        Attack("plain text, HTTP", WIRES, 0.5, 20,
               lambda h: h.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", tls=False)),
        Attack("foreign Host", PAGES, 0.5, 20, lambda h: h.ask(COMPLETIONS, {"prompt": "x"}, host="evil.example.com")),
        Attack("foreign Origin", PAGES, 0.5, 20,
               lambda h: h.ask(COMPLETIONS, {"prompt": "x"}, origin="http://evil.example.com")),
        Attack("typeless blobs", PAGES, 0.5, 20, lambda h: h.ask(COMPLETIONS, {"prompt": "x"}, content_type="")),
    ],
}  # fmt: skip
"""By process. Rates are what two cores bear beside a server: a machine with more of them bears more of each."""


class Crew:
    """The attacks of one process, from one ``go`` to its ``stop``."""

    def __init__(self, attacks: list[Attack], victim: Victim) -> None:
        self._hands = Hands(victim)
        self.endings: dict[str, Counter[str]] = {attack.name: Counter() for attack in attacks}
        self._under_way: dict[asyncio.Task[str], str] = {}
        self._paced = [asyncio.create_task(self._pace(number, attack)) for number, attack in enumerate(attacks)]

    async def _pace(self, number: int, attack: Attack) -> None:
        """The first ones are spread over a while, so that they do not come in a lump."""
        await asyncio.sleep(min(attack.every_s, 5.0) * (number % 10) / 10)
        mine: set[asyncio.Task[str]] = set()
        while True:
            if len(mine) < attack.at_once:
                task: asyncio.Task[str] = asyncio.ensure_future(attack.attempt(self._hands))  # type: ignore[arg-type]
                mine.add(task)
                self._under_way[task] = attack.name
                task.add_done_callback(mine.discard)
                task.add_done_callback(self._ended)
            await asyncio.sleep(attack.every_s)

    def _ended(self, task: asyncio.Task[str]) -> None:
        name = self._under_way.pop(task)
        if task.cancelled():
            ending = HELD
        elif (error := task.exception()) is not None:
            ending = f"{type(error).__name__}: {error}"[:100]  # the attacker's own fault: the table shows it
        else:
            ending = task.result()
        self.endings[name][ending] += 1

    async def stop(self) -> None:
        for task in self._paced:
            task.cancel()
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.gather(*self._paced, *under_way, return_exceptions=True)
        await self._hands.close()


async def run(attacks: list[Attack], victim: Victim) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    print("ready", flush=True)
    crew: Crew | None = None
    while line := await reader.readline():
        if line.startswith(b"go"):
            rows = line.decode()[3:].strip()
            crew = Crew([attack for attack in attacks if not rows or attack.row in rows.split("; ")], victim)
        elif crew is not None:
            await crew.stop()
            print(json.dumps(crew.endings), flush=True)
            crew = None


def main() -> None:
    os.nice(19)
    victim = Victim.of(sys.stdin.readline())
    asyncio.run(run(CREWS[sys.argv[1]], victim))


if __name__ == "__main__":
    main()
