"""Serve's real proxies, ingress and engine, before callers who are idle, or who send what is large inside."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.security.test_hostile_constraints import Bystander
from tests.serving import HANG_GUARD_S, MAX_MODEL_LEN, Deployment, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
STREAM = "/outrider.v1.GenerationService/GenerateStream"
SLOWER_AT_MOST = 1.5
TRIES = 15
"""To find one that no other program on this machine fell into."""

MOST_GROWTH_KIB = 64 << 10
MIB = 1 << 20


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def generate_s(stub: rpc.GenerationServiceStub, times: int) -> float:
    """Median of so many answers of 16 tokens."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        request = pb.GenerateRequest(text="One of many", sampling=pb.SamplingParameters(temperature=0, max_tokens=16))
        answer = await stub.Generate(request, timeout=HANG_GUARD_S)
        took.append(time.perf_counter() - began)
        assert answer.token_ids
    return statistics.median(took)


@contextmanager
def half_sent(url: str, number: int) -> Iterator[None]:
    """POSTs of which a header and one byte have come."""
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    connections = [socket.create_connection((host, int(port))) for _ in range(number)]
    for connection in connections:
        connection.sendall(head)
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


async def polls(call: Callable[[], Any]) -> None:
    while True:
        code = await call().code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_four_hundred_idle_callers_and_one_who_asks(no_drafter: Deployment) -> None:
    """100 silent streams, 100 half-sent POSTs, 100 status pollers and 100 Watch streams."""
    async with (
        grpc.aio.insecure_channel(no_drafter.address, OPTIONS) as channel,
        grpc.aio.insecure_channel(no_drafter.address, [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]) as others,
    ):
        stub = rpc.GenerationServiceStub(channel)
        await generate_s(stub, 3)
        alone_s = min([await generate_s(stub, 7) for _ in range(3)])
        with half_sent(no_drafter.http_url, 100):
            silent = [others.stream_stream(STREAM)(silence()) for _ in range(100)]
            health, status = health_pb2_grpc.HealthStub(others), rpc.GenerationServiceStub(others)
            watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(100)]
            for watch in watches:
                await watch.read()
            pollers = [
                asyncio.create_task(polls(lambda: status.GetServerStatus(pb.GetServerStatusRequest())))
                for _ in range(100)
            ]
            await asyncio.sleep(2)
            beside_s = math.inf
            for _ in range(TRIES):
                beside_s = min(beside_s, await generate_s(stub, 7))
                if beside_s <= SLOWER_AT_MOST * alone_s:
                    break
            await asyncio.to_thread(wait_until, no_drafter.client.healthy, HANG_GUARD_S, "healthy beside them")
            for task in pollers:
                task.cancel()
            for call in (*silent, *watches):
                call.cancel()
        alone_s = max(alone_s, min([await generate_s(stub, 7) for _ in range(3)]))  # the machine may be slower by now
    print(f"alone {alone_s:.3f} s, beside 400 idle callers {beside_s:.3f} s: x{beside_s / alone_s:.2f}")
    assert beside_s <= SLOWER_AT_MOST * alone_s


async def test_half_sent_posts_take_no_place(no_drafter: Deployment) -> None:
    """As many of them as there are places in queue and replica, on either API."""
    with half_sent(no_drafter.http_url, 400):
        async with (
            httpx.AsyncClient(trust_env=False, timeout=HANG_GUARD_S) as client,
            grpc.aio.insecure_channel(no_drafter.address, OPTIONS) as channel,
        ):
            body = {"prompt": "x", "max_tokens": 4}
            answer = await client.post(f"{no_drafter.http_url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            silent = [channel.stream_stream(STREAM)(silence()) for _ in range(400)]
            await generate_s(rpc.GenerationServiceStub(channel), 1)
            for call in silent:
                call.cancel()


def memory_kib(pid: int, of: str = "VmRSS") -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split(f"{of}:")[1].split()[0])


MANY = 1_000_000
BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "wrong values": lambda: {"prompt": "x", "stop_token_ids": ["w"] * MANY},
    "wrong values within the limit": lambda: {"prompt": [[1]] * 28_000},
    "stop strings": lambda: {"prompt": "x", "stop": ["s"] * 400_000},
    "a bad word": lambda: {"prompt": "x", "bad_words": ["b" * (6 * MIB)]},
    "empty lists": lambda: {"prompt": [[]] * (2 * MIB)},
}
MESSAGES: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: bytes(100 * MIB),
    "messages": lambda: pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * (3 * MIB))).SerializeToString(),
    "stop strings": lambda: pb.GenerateRequest(
        text="x", sampling=pb.SamplingParameters(stop=["s"] * 400_000)
    ).SerializeToString(),
    "a bad word": lambda: pb.GenerateRequest(
        text="x", sampling=pb.SamplingParameters(bad_words=["b" * (6 * MIB)])
    ).SerializeToString(),
}


def test_no_process_keeps_or_takes_what_a_small_message_blows_up_to(no_drafter: Deployment) -> None:
    processes = {
        name: actor.pid
        for name, actor in no_drafter.actors().items()
        if name.startswith(("SERVE_PROXY", "Ingress", "Target"))
    }
    assert {"Ingress", "Target"} < processes.keys()
    refused = 0
    with (
        httpx.Client(trust_env=False, timeout=HANG_GUARD_S) as client,
        grpc.insecure_channel(no_drafter.address, OPTIONS) as channel,
    ):
        post = f"{no_drafter.http_url}/v1/completions"
        client.post(post, json={"prompt": "x", "stop_token_ids": ["wrong"]})
        call = channel.unary_unary("/outrider.v1.GenerationService/Generate")
        bombs: dict[str, Callable[[], int]] = {}
        for name, body in BODIES.items():
            data = json.dumps(body(), separators=(",", ":")).encode()
            bombs[f"http: {name}"] = lambda data=data: (
                client.post(  # type: ignore[misc]
                    post, content=data, headers={"content-type": "application/json"}
                ).status_code
            )
        for name, message in MESSAGES.items():
            bombs[f"grpc: {name}"] = partial(_code, call, message())
        for name, bomb in bombs.items():
            before = {process: (memory_kib(pid), memory_kib(pid, "RssFile")) for process, pid in processes.items()}
            for pid in processes.values():
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            assert bomb() in (400, 413, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), name
            refused += 1
            for process, pid in processes.items():
                memory, of_files = before[process]
                read_back = max(0, memory_kib(pid, "RssFile") - of_files)  # pages of files, which none of these sends
                grown = memory_kib(pid, "VmHWM") - memory - read_back
                assert grown <= MOST_GROWTH_KIB, f"{name}: {process} took {grown >> 10} MiB"
    assert refused == len(BODIES) + len(MESSAGES)
    assert no_drafter.client.generate("still there", max_tokens=2).token_ids


MOST_GAP_S = 1.0
BEHIND_THE_DOOR: dict[str, tuple[str, dict[str, Any]]] = {
    "7 MiB to tokenise": ("/tokenize", {"prompt": "x" * (7 * MIB)}),
    "130,000 ids to detokenise": ("/detokenize", {"tokens": [65] * 130_000}),
    "28,000 prompts": ("/v1/completions", {"prompt": ["x"] * 28_000, "max_tokens": 1}),
    "256 prompts": ("/v1/completions", {"prompt": ["x"] * 256, "max_tokens": 1}),
    "100,000 answers, as text": ("/v1/completions", {"prompt": "x", "n": "100000", "max_tokens": 1}),
    "log-probabilities of 64 prompts": (
        "/v1/completions",
        {"prompt": [[65] * (MAX_MODEL_LEN - 8)] * 64, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    "biases for 64 answers": (
        "/v1/completions",
        {"prompt": "x", "n": 64, "temperature": 1, "logit_bias": {str(i): 1 for i in range(200)}, "max_tokens": 64},
    ),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 4096}),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 20_000}),
    "JSON for protobuf": ("/outrider/v1/stream", {"sampling": {"stop": ["x"] * 28_000}}),
}
"""Over HTTP, and such as pass the limits on size and values."""

BESIDE = [
    *(f"http: {name}" for name in (*BODIES, *BEHIND_THE_DOOR)),
    *(f"grpc: {name}" for name in (*MESSAGES, "7 MiB to tokenise", "a schema of 7 MiB")),
]
ANSWERED = (200, 400, 413, 429, *(grpc.StatusCode[name] for name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")))
FIRST_KIB: dict[int, int] = {}
"""Memory of proxy and ingress before the first bomb, by process."""


def bomb_of(name: str, deployment: Deployment) -> Callable[[], Any]:
    """All of it is made by now. It returns how the call ended."""
    api, _, what = name.partition(": ")
    if api == "http":
        path, body = BEHIND_THE_DOOR.get(what) or ("/v1/completions", BODIES[what]())
        data, typed = json.dumps(body, separators=(",", ":")).encode(), {"content-type": "application/json"}
        url, client = f"{deployment.http_url}{path}", httpx.Client(trust_env=False, timeout=HANG_GUARD_S)
        return lambda: client.post(url, content=data, headers=typed).status_code
    method, message = "Generate", MESSAGES.get(what, bytes)()
    if what == "7 MiB to tokenise":
        method, message = "Tokenize", pb.TokenizeRequest(text="x" * (7 * MIB)).SerializeToString()
    elif what == "a schema of 7 MiB":
        constraint = pb.StructuredOutputs(json='{"a": [' + "{}," * (2 * MIB) + "1]}")
        sampling = pb.SamplingParameters(structured_outputs=constraint)
        message = pb.GenerateRequest(text="x", sampling=sampling).SerializeToString()
    channel = grpc.insecure_channel(deployment.address, OPTIONS)
    return partial(_code, channel.unary_unary(f"/outrider.v1.GenerationService/{method}"), message)


@pytest.mark.parametrize("name", BESIDE)
def test_another_clients_stream_goes_on_beside_a_bomb(no_drafter: Deployment, name: str) -> None:
    """What the machine did meanwhile is left out, as far as this process knows; another program may have had the
    server's share of it, so that a gap of the bomb's own is one that comes each time."""
    doors = {each.pid for role, each in no_drafter.actors().items() if role.startswith(("SERVE_PROXY", "Ingress"))}
    assert len(doors) == 2
    for pid in doors:
        FIRST_KIB.setdefault(pid, memory_kib(pid))
    bomb, gaps = bomb_of(name, no_drafter), list[float]()
    while not gaps or (gaps[-1] > MOST_GAP_S and len(gaps) < TRIES):
        with Bystander(no_drafter, max_tokens=100) as bystander:
            assert bomb() in ANSWERED
            seen = len(bystander.times)
            wait_until(lambda seen=seen, on=bystander: len(on.times) > seen, HANG_GUARD_S, "the stream goes on")
        gaps.append(bystander.longest_gap)
    assert gaps[-1] <= MOST_GAP_S, f"each time: {gaps}"

    def grown() -> dict[int, int]:
        return {pid: memory_kib(pid) - FIRST_KIB[pid] for pid in doors}

    wait_until(lambda: max(grown().values()) <= MOST_GROWTH_KIB, HANG_GUARD_S, "memory is what it was before them all")
    print(f"{name}: {gaps[-1]:.2f} s, {max(grown().values()) >> 10} MiB")


def _code(call: Any, data: bytes) -> grpc.StatusCode:
    compression = grpc.Compression.Gzip if not any(data[:100]) else grpc.Compression.NoCompression
    try:
        call(data, compression=compression, timeout=HANG_GUARD_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
