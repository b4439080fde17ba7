"""Target replicas follow the load: a second one comes when more is asked for than one can do, and leaves when it is not
needed any more, with requests running on both."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from ray import serve

from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serving.gate import CAPACITY_METADATA
from outrider.deploy.client.sync_client import OutriderError
from outrider.deploy.top import Scrape, parse, view
from tests.serving import HANG_GUARD_S, Deployment, Deployments, engine, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SEATS, HELD, QUEUE = 4, 8, 8
CROWD = 2 * (HELD + QUEUE)
FEW = 2
ANSWER_TOKENS = 200
LONG_ANSWER_TOKENS = 800


@pytest.fixture
def autoscaled(deployments: Deployments) -> Deployment:
    target = deployments._configurations["no_drafter"]["target"]
    deployments.add(
        "autoscaled",
        {
            "target": {**engine(target["model"]), "max_num_seqs": SEATS},
            "serving": {
                "max_ongoing_requests": HELD,
                "max_queued_requests": QUEUE,
                "autoscaling": {
                    "min": 1,
                    "max": 2,
                    "target_queue_s": 0.5,
                    "upscale_delay_s": 2,
                    "downscale_delay_s": 10,
                },
            },
        },
    )
    return deployments.use("autoscaled")


class Callers:
    """So many, each with one request after the other. Those that are refused ask again."""

    def __init__(self, deployment: Deployment, tokens: int) -> None:
        self._deployment, self._tokens = deployment, tokens
        self._over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _call(self, number: int) -> None:
        prompt = [(number * 11 + position * 5) % 250 for position in range(20)]
        client = self._deployment.client
        while not self._over.is_set():
            try:
                with client.stream(prompt, temperature=0.0, max_tokens=self._tokens, ignore_eos=True) as messages:
                    tokens = [token for message in messages for token in message.token_ids]
            except OutriderError as error:
                self.outcomes[error.code.name] += 1
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self._over.wait(0.2)
                else:
                    self.wrong.append(str(error))
                continue
            self.outcomes["finished"] += 1
            if len(tokens) != self._tokens:
                self.wrong.append(f"{len(tokens)} tokens of {self._tokens}")

    @contextmanager
    def calling(self, callers: int) -> Iterator[None]:
        """What they have begun they end."""
        threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(HANG_GUARD_S)
        assert not any(thread.is_alive() for thread in threads), "a request hangs"


def scraped(deployment: Deployment) -> Scrape:
    with urllib.request.urlopen(f"{deployment.http_url}/metrics", timeout=HANG_GUARD_S) as response:
        return parse(response.read().decode(), time.monotonic())


def capacity(deployment: Deployment) -> int:
    with urllib.request.urlopen(f"{deployment.http_url}/health", timeout=HANG_GUARD_S) as response:
        return int(response.headers[CAPACITY_METADATA])


def loads(deployment: Deployment) -> list[dict[str, Any]]:
    """Of the replicas that get requests."""
    handle = serve.get_deployment_handle("Target", deployment.config.serving.app_name)
    replies = asyncio.run(broadcast(handle, "status", timeout_s=30.0))
    return [reply.value["target"] for reply in replies if reply.ok]


def test_a_second_replica_comes_with_the_load_and_leaves_with_it(autoscaled: Deployment) -> None:
    assert len(autoscaled.replicas()) == 1
    assert capacity(autoscaled) == HELD + QUEUE
    crowd = Callers(autoscaled, ANSWER_TOKENS)
    with crowd.calling(CROWD):
        wait_until(lambda: capacity(autoscaled) == 2 * HELD + QUEUE, 3 * HANG_GUARD_S, "room of two replicas", 0.5)
        wait_until(lambda: len(loads(autoscaled)) == 2, HANG_GUARD_S, "two replicas", 0.5)
        wait_until(lambda: all(load["running"] for load in loads(autoscaled)), HANG_GUARD_S, "both busy", 0.5)
        seen = scraped(autoscaled)
    print(f"a crowd of {CROWD}: {dict(crowd.outcomes)}")
    assert crowd.wrong == []
    assert crowd.outcomes["RESOURCE_EXHAUSTED"], "a crowd that one replica has room for shows nothing"
    assert seen.sum("outrider:refused_generations_total"), "refusals are what tells of it"
    scaling = view(None, seen).scaling
    assert scaling is not None
    assert (scaling.wanted, scaling.most) == (2, 2)

    few = Callers(autoscaled, LONG_ANSWER_TOKENS)
    before_it_left: list[dict[str, Any]] = []

    def one_is_left() -> bool:
        nonlocal before_it_left
        now = loads(autoscaled)
        if len(now) == 2:
            before_it_left = now
        return len(now) == 1

    with few.calling(FEW):
        wait_until(one_is_left, HANG_GUARD_S, "one replica taken away", 0.2)
        wait_until(lambda: len(autoscaled.replicas()) == 1, HANG_GUARD_S, "its end", 0.5)
        wait_until(lambda: capacity(autoscaled) == HELD + QUEUE, HANG_GUARD_S, "room of one replica", 0.5)
    print(f"{FEW} callers: {dict(few.outcomes)}, last seen on two replicas: {before_it_left}")
    assert few.wrong == []
    assert set(few.outcomes) == {"finished"}

    def told() -> bool:
        scaling = view(None, scraped(autoscaled)).scaling
        return scaling is not None and (scaling.wanted, scaling.running) == (1, 1)

    wait_until(told, HANG_GUARD_S, "the metrics of it", 0.5)
