"""The wire between a target and an ingress on another host is cut. The tests follow each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.support.cluster.hosts import LINK_DEADLINE_S, LOADED_WITHIN_S, OTHER_HOST, Hosts, served_on_hosts
from tests.support.cluster.pools import MAX_TOKENS, PROMPT
from tests.support.cluster.serving import Models, engine, wait_until
from tests.support.cluster.wire import can_make_hosts
from tests.support.load.streams import join, under_way

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]

STREAMS = 4


@pytest.fixture(scope="module")
def far_target(models: Models) -> Iterator[Hosts]:
    """Serve an application whose target and drafter are on the other host."""
    target = engine(models.target, max_num_seqs=4, node_labels=OTHER_HOST)
    with served_on_hosts(models, target=target, drafter={"method": "ngram"}) as there:
        yield there


def test_a_target_behind_a_wire_that_is_cut_for_a_while_goes_on(far_target: Hosts) -> None:
    streams = under_way(far_target.app.client, STREAMS, MAX_TOKENS)
    with far_target.other.weather(is_cut=True):
        time.sleep(1.5 * LINK_DEADLINE_S)
    assert join(streams) == []
    for stream in streams:
        far_target.app.reference.check(stream.prompt, stream.tokens, label="through the cut")


def test_requests_of_a_target_that_is_cut_off_are_told_and_a_retry_finds_another(far_target: Hosts) -> None:
    streams = under_way(far_target.app.client, STREAMS, MAX_TOKENS)
    with far_target.other.weather(is_cut=True):
        cut = time.monotonic()
        told = join(streams)
        print(f"{len(told)} of {STREAMS} were told within {time.monotonic() - cut:.1f} s of the cut")
        assert {error.code for error in told} == {grpc.StatusCode.UNAVAILABLE}
        assert len(told) == STREAMS, "nobody else could have answered"
    with far_target.node():

        def served() -> list[int] | None:
            with suppress(OutriderError):
                return list(far_target.app.client.generate(PROMPT, temperature=0.0, max_tokens=40).token_ids)
            return None

        answer = wait_until(served, LOADED_WITHIN_S, "another target", every_s=1.0)
        far_target.app.reference.check(PROMPT, answer, label="from another target")
