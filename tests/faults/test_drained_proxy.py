"""A node that is drained takes its proxy along (`proxy_location: EveryNode`): what that proxy's clients see."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

import grpc
import pytest

from outrider.cluster.placement import available_cores
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from tests.support.cluster.hosts import LOADED_WITHIN_S, OTHER_HOST, Hosts, served_on_hosts
from tests.support.cluster.pools import PROMPT, ask_registry
from tests.support.cluster.serving import HANG_GUARD_S, Models, engine, wait_until
from tests.support.cluster.wire import THERE, can_make_hosts
from tests.support.load.streams import join, under_way

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="no right to make namespaces"),
]

STREAMS, MAX_TOKENS = 4, 900
TOLD_WITHIN_S = 60.0
DRAINED_FOR = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60"}
"""A node that goes may take so long: longer than these answers."""


@pytest.fixture
def hosts(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """A drafter of the pool on the other, and with it a proxy."""
    for name, value in DRAINED_FOR.items():
        monkeypatch.setenv(name, value)
    with served_on_hosts(
        models,
        "EveryNode",
        target=engine(models.target, max_num_seqs=8, cores=[[available_cores()[0]]]),
        drafter={"method": "ngram", "placement": "pool", "node_labels": OTHER_HOST},
        speculation={"num_speculative_tokens": 8, "adaptive": False},
        serving={"host": "0.0.0.0"},
    ) as there:
        wait_until(lambda: ask_registry(there.app, "drafters"), LOADED_WITHIN_S, "a drafter", every_s=0.5)
        yield there


@dataclass
class FarProxy:
    """Reaches the proxy of the other host, as its clients do."""

    hosts: Hosts

    def __post_init__(self) -> None:
        serving = self.hosts.app.config.serving
        self.client = OutriderClient(f"{THERE}:{serving.grpc_port}")
        self._probe = f"http://{THERE}:{serving.http_port}/-/healthz"

    def probe(self) -> int:
        """Return the status that a load balancer gets. 0: nobody answers."""
        try:
            with urllib.request.urlopen(self._probe, timeout=HANG_GUARD_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ask(self) -> OutriderError | None:
        """Check an answer, or return the error that came instead."""
        try:
            answer = self.client.generate(PROMPT, temperature=0.0, max_tokens=40)
        except OutriderError as error:
            return error
        self.hosts.app.reference.check(PROMPT, answer.token_ids, label="by the far proxy")
        return None


def test_its_clients_have_their_answers_and_are_told_to_go_elsewhere(hosts: Hosts) -> None:
    far = FarProxy(hosts)
    wait_until(lambda: far.ask() is None, LOADED_WITHIN_S, "a proxy there", every_s=0.5)
    assert far.probe() == HTTPStatus.OK
    streams = under_way(far.client, STREAMS, MAX_TOKENS)
    began = time.monotonic()
    hosts.end_node()
    wait_until(lambda: far.probe() == HTTPStatus.SERVICE_UNAVAILABLE, TOLD_WITHIN_S, "it says that it goes")
    print(f"its probe fails {time.monotonic() - began:.1f} s after the node was told to go")
    assert far.ask() is None, "who comes all the same is answered"
    assert join(streams) == []
    for stream in streams:
        hosts.app.reference.check(stream.prompt, stream.tokens, label="through a proxy that goes")
    gone = wait_until(far.ask, HANG_GUARD_S, "it goes")
    print(f"gone {time.monotonic() - began:.1f} s after the node was told to go")
    assert gone.code is grpc.StatusCode.UNAVAILABLE
    assert far.probe() == 0
    answer = hosts.app.client.generate(PROMPT, temperature=0.0, max_tokens=40)
    hosts.app.reference.check(PROMPT, answer.token_ids, label="by the head's proxy")
