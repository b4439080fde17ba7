"""The legitimate load of `tests.bench.soak`: clients who stream one answer after the other, and look at each."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import grpc
import httpx

from outrider.deploy.client.async_client import AsyncOutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb

MAX_TOKENS = 96
TIMEOUT_S = 120.0
"""Of one answer: a client's own deadline, far beyond what it takes."""

SCHEMA = {"type": "array", "items": {"enum": list(range(100, 200))}, "minItems": 12, "maxItems": 12}
PROMPTS = (
    "to be or not to be, that is the question: to be or not",
    "a rose is a rose is a rose is a",
    "round and round and round it goes",
    "one two three four one two three four one",
)

WHOLE = ("length", "stop")

Piece = tuple[list[int], str | None]
"""Tokens of one message, and how the answer ended, in the last one."""


@dataclass
class Answer:
    prompt: str
    tokens: list[int]
    ended: str | None
    """``length`` or ``stop``; ``abort``, or None where it broke off or never began."""


@dataclass
class Client:
    """One of them. kind: ``grpc``, ``http`` or ``json``, which is gRPC with a schema."""

    name: str
    kind: str
    prompts: tuple[str, ...]
    alone: list[Answer] = field(default_factory=list)
    """What it is told of each prompt when nobody else asks."""

    answers: list[Answer] = field(default_factory=list)
    """What it was told, in turn."""

    errors: list[str] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came (time.monotonic), and how many."""

    asked: list[float] = field(default_factory=list)
    """When."""

    took: list[tuple[float, float]] = field(default_factory=list)
    """Of each answer that has ended: when it was asked for, and for how many seconds it was under way."""

    every_s: float = 0.0
    """From one question to the next, or as soon as it is answered where that takes longer. 0: always at once."""


def clients(grpc_streams: int = 4, http_streams: int = 2, json_streams: int = 1) -> list[Client]:
    """Each with two prompts of its own, in turn."""
    counts = {"grpc": grpc_streams, "http": http_streams, "json": json_streams}
    made: list[Client] = []
    for kind, count in counts.items():
        for number in range(count):
            first, second = (PROMPTS[(len(made) + step) % len(PROMPTS)] for step in (0, 1))
            name = f"{kind}-{number}"
            made.append(Client(name, kind, (f"{name}: {first}", f"{name}: {second}")))
    return made


class Load:
    """All of them. Times are of time.monotonic."""

    def __init__(self, grpc_address: str, http_address: str, authority: str, key: str, load: list[Client]) -> None:
        self.clients = load
        self._grpc = AsyncOutriderClient(
            grpc_address, api_key=key, credentials=grpc.ssl_channel_credentials(authority.encode())
        )
        self._url = f"https://{http_address}/v1/completions"
        context = ssl.create_default_context(cadata=authority)
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(verify=context, trust_env=False, timeout=TIMEOUT_S, headers=headers)
        self._over = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._grpc.close()
        await self._http.aclose()

    async def alone(self) -> None:
        """Every answer, one after the other."""
        for client in self.clients:
            for prompt in client.prompts:
                client.alone.append(await self._answer(client, prompt, f"alone-{client.name}"))

    async def ask_beside(self) -> None:
        """One of each of the other calls: for the first of a kind the server opens what it keeps."""
        await self._grpc.status()
        await self._grpc.model_info()
        await self._grpc.server_info()
        await self._grpc.healthy()
        await self._grpc.abort("nobody")

    def start(self) -> None:
        self._over.clear()
        self._running = [asyncio.create_task(self._run(client)) for client in self.clients]

    async def stop(self) -> None:
        """When each has the answer it is at."""
        self._over.set()
        await asyncio.gather(*self._running)

    def pace(self, busy: float) -> None:
        """From now on each waits for an answer for this share of its time, if answers take as long as they did."""
        for client in self.clients:
            seconds = [took for _, took in client.took]
            client.every_s = sum(seconds) / len(seconds) / busy if busy < 1 else 0.0

    async def _run(self, client: Client) -> None:
        next_s = time.monotonic()
        while not self._over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_s - time.monotonic())):
                    await self._over.wait()
                    return
            next_s = time.monotonic() + client.every_s
            number = len(client.answers)
            prompt = client.prompts[number % len(client.prompts)]
            try:
                client.answers.append(await self._answer(client, prompt, request_id(client.name, number)))
            except (OutriderError, httpx.HTTPError, ValueError, KeyError) as error:
                client.errors.append(f"{type(error).__name__}: {error}"[:300])
                client.answers.append(Answer(prompt, [], None))
                await asyncio.sleep(0.2)

    async def _answer(self, client: Client, prompt: str, name: str) -> Answer:
        answer, asked_s = Answer(prompt, [], None), time.monotonic()
        client.asked.append(asked_s)
        pieces = self._post(prompt) if client.kind == "http" else self._stream(client, prompt, name)
        async with aclosing(pieces):
            async for tokens, ended in pieces:
                if tokens:
                    client.arrivals.append((time.monotonic(), len(tokens)))
                answer.tokens += tokens
                answer.ended = ended or answer.ended
        client.took.append((asked_s, time.monotonic() - asked_s))
        return answer

    async def _stream(self, client: Client, prompt: str, name: str) -> AsyncIterator[Piece]:
        options: dict[str, Any] = {"json_schema": SCHEMA} if client.kind == "json" else {"ignore_eos": True}
        async with self._grpc.stream(
            prompt, request_id=name, temperature=0.0, max_tokens=MAX_TOKENS, timeout_s=TIMEOUT_S, **options
        ) as stream:
            async for message in stream:
                reason = message.finish_reason
                ended = pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if reason else None
                yield list(message.token_ids), ended

    async def _post(self, prompt: str) -> AsyncIterator[Piece]:
        """Raises HTTPError for any other status than 200, ValueError for what the stream says of an error."""
        body = {
            "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        async with self._http.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(event["error"])
                for choice in event["choices"]:
                    yield choice.get("token_ids") or [], choice["finish_reason"]


def request_id(name: str, number: int) -> str:
    """Of a client's so manieth request: strangers may guess it."""
    return f"{name}-{number}"


def lost(client: Client) -> int:
    """Requests without an answer, or with half of one."""
    return sum(answer.ended not in WHOLE for answer in client.answers)


def differing(client: Client) -> list[tuple[Answer, Answer]]:
    """(when alone, what it was told): of whole answers that are others than when alone."""
    alone = {answer.prompt: answer for answer in client.alone}
    whole = [answer for answer in client.answers if answer.ended in WHOLE]
    return [(alone[answer.prompt], answer) for answer in whole if answer != alone[answer.prompt]]


def tokens_between(load: Sequence[Client], start_s: float, end_s: float) -> int:
    return sum(count for client in load for at, count in client.arrivals if start_s <= at < end_s)


def seconds_an_answer(load: Sequence[Client], start_s: float, end_s: float) -> list[float]:
    """Of those that were asked for in between."""
    return [took for client in load for asked_s, took in client.took if start_s <= asked_s < end_s]


def longest_gap_s(load: Sequence[Client], start_s: float, end_s: float) -> float:
    """Between two messages of one client, or two of its answers, but for the pauses of one that makes any."""
    longest = 0.0
    for client in load:
        came = [(at, False) for at, _ in client.arrivals]
        if client.every_s:
            events = sorted([*came, *((at, True) for at in client.asked)])
        else:
            events = [(start_s, False), *came, (end_s, False)]
        events = [(at, is_question) for at, is_question in events if start_s <= at <= end_s]
        for (earlier, _), (later, is_question) in pairwise(events):
            if not is_question:
                longest = max(longest, later - earlier)
    return longest
