"""Random and damaged requests to every RPC: each gets an answer or a status that blames the request, and nothing of
them is left.

OUTRIDER_FUZZ_CALLS sets how many (300; exhaustive runs send 1,500), OUTRIDER_FUZZ_SEED which. Hypothesis shrinks what
fails to the smallest request that does.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress

import grpc
import grpc.aio
import psutil
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.support.cluster.serving import HANG_GUARD_S, Deployment, drafted, wait_until_idle
from tests.support.fuzz.protobuf import FUZZ, GENERATIONS, RPCS, Call, calls

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

CALLS = int(os.environ.get("OUTRIDER_FUZZ_CALLS", "300"))
SEED = int(os.environ.get("OUTRIDER_FUZZ_SEED", "1"))
SWEEPS = [CALLS, pytest.param(5 * CALLS, marks=pytest.mark.exhaustive)]
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
"""Growth of ingress and proxy together, over all requests after the first few hundred: what an allocator keeps, no leak
of requests, which are up to a megabyte each."""


async def outcome(channel: grpc.aio.Channel, each: Call) -> grpc.StatusCode:
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


def verdict(each: Call, code: grpc.StatusCode) -> str | None:
    """Return what is wrong with this outcome; None: nothing."""
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
    """Return the memory of the processes that requests pass through on their way in."""
    actors = pair.actors()
    pids = [actor.pid for name, actor in actors.items() if name == "Ingress" or "PROXY" in name]
    assert len(pids) >= 2, f"no proxy or no ingress among {sorted(actors)}"
    return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20


@pytest.mark.parametrize("number", SWEEPS)
def test_no_request_breaks_the_server(pair: Deployment, capsys: pytest.CaptureFixture[str], number: int) -> None:
    codes: Counter[tuple[str, str]] = Counter()
    paths: set[str] = set()
    early = 0.0

    async def outcomes(batch: list[Call]) -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(pair.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            return list(await asyncio.gather(*(outcome(channel, each) for each in batch)))

    @seed(SEED)
    @settings(FUZZ, derandomize=False, max_examples=max(1, number // CONCURRENCY))
    @given(st.lists(calls(), min_size=CONCURRENCY, max_size=CONCURRENCY))
    def send(batch: list[Call]) -> None:
        nonlocal early
        if not early and codes.total() >= number // 3:
            early = memory_mib(pair)
        for each, code in zip(batch, asyncio.run(outcomes(batch)), strict=True):
            paths.add(each.path)
            codes["decodable" if each.message is not None else "undecodable", code.name] += 1
            assert verdict(each, code) is None, f"{code.name} of {each.path} for {each.data[:200].hex()}"

    send()
    grown = memory_mib(pair) - early
    with capsys.disabled():
        print(f"\nfuzz: seed {SEED}, {codes.total()} calls, memory +{grown:.0f} MiB, {dict(codes)}")
    assert paths == set(RPCS)
    assert codes["decodable", "OK"] > codes.total() // 20, "next to nothing got as far as the engine"
    wait_until_idle(pair, HANG_GUARD_S)
    assert pair.drafter_status()["num_sequences"] == 0
    assert grown < MAY_GROW_BY_MIB
    answer = drafted(lambda: pair.client.generate(PROMPT, temperature=0.0, max_tokens=24))
    pair.reference.check(PROMPT, answer.token_ids, label="after the fuzzer")
