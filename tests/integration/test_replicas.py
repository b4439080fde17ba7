"""Two target replicas on one machine: who gets which request, and what happens when more come than both can hold."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx
import pytest
from ray import serve

from outrider.actors.serve_adapter.broadcast import broadcast
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.cluster.scrape import parse
from tests.support.cluster.serving import HANG_GUARD_S, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 128
"""Tokens in a KV block on CPU: what is cached is a multiple of it."""

SHARED_TOKENS = 2 * BLOCK + 40
FLOOD = 200
ANSWER_TOKENS = 48


def ask_all(deployment, method, *args):
    handle = serve.get_deployment_handle("Target", deployment.config.serving.app_name)
    return asyncio.run(broadcast(handle, method, *args, timeout_s=30.0))


def rounds(deployment):
    """Rounds served so far, by replica."""
    return {reply.replica_id: reply.value["rounds"]["rounds"] for reply in ask_all(deployment, "status")}


def conversation(topic, turn):
    """Prompts of one topic share their first tokens, and no more."""
    beginning = [(topic * 7 + position) % 250 for position in range(SHARED_TOKENS)]
    return [*beginning, *[(100 + turn * 13 + topic) % 250] * 30]


def test_a_broadcast_reaches_each_replica_by_name(two_replicas):
    replies = ask_all(two_replicas, "status")
    assert all(reply.ok for reply in replies), replies
    assert {reply.replica_id for reply in replies} == set(two_replicas.replicas())
    assert len(replies) == 2
    failed = ask_all(two_replicas, "no_such_method")
    assert {reply.replica_id for reply in failed} == set(two_replicas.replicas())
    assert all("no_such_method" in reply.error for reply in failed)


def test_a_shared_prefix_finds_the_replica_that_has_it(two_replicas):
    homes = {}
    for topic in range(64):
        before = rounds(two_replicas)
        two_replicas.client.generate(conversation(topic, 0), temperature=0.0, max_tokens=4)
        after = rounds(two_replicas)
        homes[topic] = [replica for replica in after if after[replica] > before[replica]]
        if len(homes) >= 4 and len({home for (home,) in homes.values()}) == 2:
            break
    assert len({home for (home,) in homes.values()}) == 2, "all topics have gone to one replica"
    for turn in range(1, 5):
        for topic, home in homes.items():
            before = rounds(two_replicas)
            prompt = conversation(topic, turn)
            answer = two_replicas.client.generate(prompt, temperature=0.0, max_tokens=8)
            after = rounds(two_replicas)
            assert [replica for replica in after if after[replica] > before[replica]] == home
            assert answer.usage.cached_tokens == 2 * BLOCK
            two_replicas.reference.check(prompt, answer.token_ids, label=f"topic {topic}, turn {turn}")


@dataclass
class Call:
    """How one request of a flood ended: refused, finished with so many tokens, or in error."""

    refused: bool
    tokens: int = 0
    error: str = ""
    seconds: float = 0.0


Ask = Callable[[int, int], Awaitable[Call]]
"""Asks for an answer, given the number of a prompt and the tokens of the answer."""


def prompt_of(number):
    return [number % 250, (number * 3) % 250, 5, 6, 7]


@asynccontextmanager
async def over_grpc(deployment) -> AsyncIterator[Ask]:
    async with grpc.aio.insecure_channel(deployment.address) as channel:
        stub = rpc.GenerationServiceStub(channel)

        async def ask(number, tokens):
            sampling = pb.SamplingParameters(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt_of(number)), sampling=sampling)
            try:
                answer = await stub.Generate(request, timeout=HANG_GUARD_S)
            except grpc.aio.AioRpcError as error:
                return Call(error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error=str(error))
            return Call(False, len(answer.token_ids))

        yield ask


async def flood(deployment):
    """Ask for short answers, all at once, and return how each call ended."""
    async with (
        over_grpc(deployment) as ask,
        httpx.AsyncClient(base_url=deployment.http_url, timeout=HANG_GUARD_S) as client,
    ):

        async def one(number):
            started = time.monotonic()
            call = await ask(number, ANSWER_TOKENS)
            call.seconds = time.monotonic() - started
            return call

        tasks = [asyncio.ensure_future(one(number)) for number in range(FLOOD)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        health = await client.get("/health")
        assert health.status_code == 200, "a full queue is no illness"
        return await asyncio.gather(*tasks)


def check(calls):
    """Return how many were refused, once each was refused or finished."""
    assert [call.error for call in calls if call.error and not call.refused] == []
    refused = [call.seconds for call in calls if call.refused]
    finished = [call.seconds for call in calls if not call.refused]
    assert {call.tokens for call in calls if not call.refused} == {ANSWER_TOKENS}
    # Both replicas' share and the queue are served; a burst may find the queue full a little early.
    assert len(finished) >= 32
    print(f"{len(finished)} finished, {len(refused)} refused, the slowest refusal after {max(refused):.2f} s")
    # A refusal does not wait for a place: the last one is out while answers are still to come.
    assert max(refused) < max(finished)
    return len(refused)


def refused_by_the_ingress(deployment):
    time.sleep(1.1)  # two scrapes within a second are one
    with urllib.request.urlopen(f"{deployment.http_url}/metrics", timeout=HANG_GUARD_S) as response:
        return parse(response.read().decode(), time.monotonic()).sum("outrider:admission_rejections_total")


def test_more_requests_than_there_is_room_for(two_replicas):
    """Sixteen are held and thirty-two wait; the rest is refused, and nothing of them is left behind."""
    check(asyncio.run(flood(two_replicas)))
    refused_before = refused_by_the_ingress(two_replicas)
    refused = check(asyncio.run(flood(two_replicas)))
    assert refused_by_the_ingress(two_replicas) - refused_before == refused, "each is counted"
    wait_until(lambda: is_idle(two_replicas), HANG_GUARD_S, "no request left on either replica")


def is_idle(deployment):
    loads = [reply.value["target"] for reply in ask_all(deployment, "status")]
    return not any(load["running"] or load["waiting"] for load in loads)
