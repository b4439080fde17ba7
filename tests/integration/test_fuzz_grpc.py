"""Random and mutated requests to every RPC, by the thousand: each gets an answer or a status that blames the request,
and nothing of them is left.

OUTRIDER_FUZZ_CASES (1500) and OUTRIDER_FUZZ_SEED (1) set how many and which; but for exhaustive runs it is the first
fifth of them, every RPC and kind of mutation among them. A failure names seed and case;
``tests.fuzz_cases.case(seed, number)`` makes that one again.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import grpc.aio
import psutil
import pytest

from tests.fuzz_cases import GENERATIONS, Case, case
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, drafted, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

REQUESTS = int(os.environ.get("OUTRIDER_FUZZ_CASES", "1500"))
SEED = int(os.environ.get("OUTRIDER_FUZZ_SEED", "1"))
SWEEPS = [REQUESTS // 5, pytest.param(REQUESTS, marks=pytest.mark.exhaustive)]
CONCURRENCY = 12
PROMPT = list(b"Once upon a time there was a request. " * 4)

SERVED = {grpc.StatusCode.OK}
BLAMES_THE_REQUEST = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,  # two cases of one id at the same time
    grpc.StatusCode.NOT_FOUND,  # health of a service that is not there
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
MAY_GROW_BY_MIB = 96
"""Of ingress and proxy together, over all requests after the first few hundred: what an allocator keeps, not a leak
of requests, which are up to a megabyte each."""


async def outcome(channel: grpc.aio.Channel, each: Case) -> grpc.StatusCode:
    """Send one case, its bytes as they are, and see it through."""
    method = channel.unary_stream(each.path) if each.streaming else channel.unary_unary(each.path)
    call = method(each.data, timeout=HANG_GUARD_S)
    if each.cancel:
        asyncio.get_running_loop().call_later(0.02, call.cancel)
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # the code says it
        if each.streaming:
            async for _ in call:
                pass
        else:
            await call
    return await call.code()


def verdict(each: Case, code: grpc.StatusCode) -> str | None:
    """What is wrong with this outcome; None: nothing."""
    if each.cancel and code is grpc.StatusCode.CANCELLED:
        return None
    message = each.message
    if message is None:
        undecodable = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
        return None if code in undecodable else "undecodable, and not told so"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        asked_for = each.path in GENERATIONS and message.HasField("timeout_ms")
        return None if asked_for else "hangs"
    if code is grpc.StatusCode.UNAVAILABLE and each.path.endswith("/GetServerStatus"):
        return None  # rank 0 is in a long step
    return None if code in SERVED | BLAMES_THE_REQUEST else "decodable, and it is not the request's fault"


def memory_mib(pair: Deployment) -> float:
    """Of the processes that requests pass through on their way in."""
    actors = pair.actors()
    pids = [actor.pid for name, actor in actors.items() if name == "Ingress" or "PROXY" in name]
    assert len(pids) >= 2, f"no proxy or no ingress among {sorted(actors)}"
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


@pytest.mark.parametrize("requests", SWEEPS)
async def test_no_request_breaks_the_server(
    pair: Deployment, capsys: pytest.CaptureFixture[str], requests: int
) -> None:
    waiting = iter(range(requests))
    codes: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    early = 0.0

    async def send_in_turn(channel: grpc.aio.Channel) -> None:
        nonlocal early
        for number in waiting:
            if number == min(300, requests // 3):
                early = memory_mib(pair)
            each = case(SEED, number)
            code = await outcome(channel, each)
            codes["decodable" if each.message is not None else "undecodable", code.name] += 1
            if problem := verdict(each, code):
                wrong.append(f"case {number}: {code.name} ({problem}) {each.path} {each.data[:200].hex()}")

    async with grpc.aio.insecure_channel(pair.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        await asyncio.gather(*(send_in_turn(channel) for _ in range(CONCURRENCY)))
    grown = memory_mib(pair) - early
    with capsys.disabled():
        print(f"\nfuzz: seed {SEED}, {requests} requests, memory +{grown:.0f} MiB, {dict(codes)}")
    assert not wrong, f"seed {SEED}: {len(wrong)} wrong outcomes:\n" + "\n".join(wrong[:20])
    assert codes["decodable", "OK"] > requests // 20, "next to nothing got as far as the engine"
    wait_until_idle(pair, HANG_GUARD_S)
    assert pair.drafter_status()["num_sequences"] == 0
    assert grown < MAY_GROW_BY_MIB
    answer = drafted(lambda: pair.client.generate(PROMPT, temperature=0.0, max_tokens=24))
    pair.reference.check(PROMPT, answer.token_ids, label="after the fuzzer")


@pytest.mark.parametrize("path", GENERATIONS)
async def test_too_many_request_messages_end_the_call(pair: Deployment, path: str) -> None:
    """A client that sends two where one is taken."""
    number = next(n for n in range(1000) if case(SEED, n).path == path and case(SEED, n).message is not None)
    data = case(SEED, number).data

    async def requests() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield data

    async with grpc.aio.insecure_channel(pair.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream(path)(requests(), timeout=30.0)
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert await call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    assert pair.status().model
    wait_until_idle(pair, HANG_GUARD_S)
