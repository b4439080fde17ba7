"""One of two ingresses behind a proxy is killed, and only the answers that it was in the middle of are lost."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import grpc
import pytest

from tests.support.cluster.pools import scraped
from tests.support.cluster.processes import INGRESS, VERIFIER, processes, stopped
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, wait_until, wait_until_idle
from tests.support.load.streams import Stream, join, under_way

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STREAMS, MAX_TOKENS = 4, 900
"""As many as have a seat at either target: none waits."""
BACK_WITHIN_S = 300.0
PROMPT = list(b"Whichever door it is, the words are the same. ")


def by_ingress(pool: Deployment) -> dict[str, int]:
    """Calls over gRPC that each has in its hands."""
    found = scraped(pool).of("outrider:requests_in_flight", api="grpc")
    return {labels["ingress"]: int(value) for labels, value in found}


def told_of(pool: Deployment) -> set[str]:
    """Return the ingresses whose counts are in one scrape. A count appears with the first request."""
    now = scraped(pool)
    return {labels["ingress"] for name in now.samples for labels, _ in now.of(name) if "ingress" in labels}


def test_one_of_two_is_killed_and_only_its_own_answers_are_lost(pool: Deployment) -> None:
    wait_until(lambda: len(pool.replicas(INGRESS)) == 2, HANG_GUARD_S, "two ingresses")
    wait_until_idle(pool, HANG_GUARD_S)
    streams = under_way(pool.client, STREAMS, MAX_TOKENS)
    with ExitStack() as no_token_more:
        for pid in processes(pool)[VERIFIER]:
            no_token_more.enter_context(stopped(pid))
        held = by_ingress(pool)
        assert sum(held.values()) == STREAMS, "all of them are still under way, or this shows nothing"
        lost, number = max(held.items(), key=lambda item: item[1])
        assert 0 < number < STREAMS, "each has some"
        os.kill(pool.replicas(INGRESS)[lost], signal.SIGKILL)
    told = join(streams)
    assert len(told) == number
    assert {error.code for error in told} == {grpc.StatusCode.UNAVAILABLE}
    for each in streams:
        assert each.error is not None or len(each.tokens) == MAX_TOKENS
        pool.reference.check(each.prompt, each.tokens, label="beside the death")
    again = pool.client.generate(PROMPT, temperature=0.0, max_tokens=8)
    pool.reference.check(PROMPT, again.token_ids, label="through the other")
    wait_until(lambda: len(pool.replicas(INGRESS)) == 2, BACK_WITHIN_S, "another in its place")
    wait_until(lambda: told_of(pool) == {*pool.replicas(INGRESS)}, HANG_GUARD_S, "both in one scrape", every_s=0.5)
    wait_until_idle(pool, HANG_GUARD_S)


def test_whichever_holds_a_request_it_is_ended_by_its_id(pool: Deployment) -> None:
    for number in range(6):
        stream = Stream(PROMPT, MAX_TOKENS, f"ended-{number}")
        stream.start(pool.client)
        wait_until(lambda stream=stream: stream.tokens, HANG_GUARD_S, "under way")
        assert pool.client.abort(f"ended-{number}")
        stream.join()
        assert stream.error is None
        assert len(stream.tokens) < MAX_TOKENS
    wait_until_idle(pool, HANG_GUARD_S)
