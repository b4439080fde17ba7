"""Target replicas follow the load: a second one comes when more is asked for than one can do, and leaves when it is not
needed any more, while requests run on both and others come."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import grpc
import pytest
import ray
from ray import serve

from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serving.gate import CAPACITY_METADATA
from outrider.actors.serving.scaling_board import board_name
from outrider.cluster.placement import NAMESPACE
from outrider.deploy.client.sync_client import OutriderError
from outrider.deploy.top import Scrape, parse, view
from tests.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.traffic import running

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SEATS, HELD, QUEUE = 6, 8, 8
CROWD = HELD + QUEUE + 4
"""Callers over gRPC, and as many over HTTP: more than either API's proxy lets in for one replica."""

FEW = 2

ANSWER_TOKENS, SHORT_ANSWER_TOKENS, LONG_ANSWER_TOKENS = 200, 8, 800


@pytest.fixture
def autoscaled(deployments: Deployments, models: Models) -> Deployment:
    deployments.add(
        "autoscaled",
        {
            "target": engine(models.target, max_num_seqs=SEATS),
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

    def _call(self, number: int, ask: Callable[[list[int]], int]) -> None:
        """ask: for an answer of a prompt. Returns how many tokens it has, 0: it was refused."""
        prompt = [(number * 11 + position * 5) % 250 for position in range(20)]
        while not self._over.is_set():
            try:
                tokens = ask(prompt)
            except Exception as error:  # noqa: BLE001 - whatever it is, no caller may get it
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            if tokens == 0:
                self.outcomes["refused"] += 1
                self._over.wait(0.2)
            elif tokens == self._tokens:
                self.outcomes["finished"] += 1
            else:
                self.wrong.append(f"{tokens} tokens of {self._tokens}")

    def _over_grpc(self, prompt: list[int]) -> int:
        client, sampling = self._deployment.client, {"temperature": 0.0, "max_tokens": self._tokens}
        try:
            with client.stream(prompt, ignore_eos=True, **sampling) as messages:
                return sum(len(message.token_ids) for message in messages)
        except OutriderError as error:
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return 0
            raise

    def _over_http(self, prompt: list[int]) -> int:
        body = {"prompt": prompt, "temperature": 0.0, "max_tokens": self._tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._deployment.http_url}/v1/completions",
            json.dumps({"model": self._deployment.config.served_model_name, **body}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as response:
                return int(json.load(response)["usage"]["completion_tokens"])
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.TOO_MANY_REQUESTS:
                return 0
            raise AssertionError(f"{error}: {error.read().decode()}") from None

    @contextmanager
    def calling(self, callers: int) -> Iterator[None]:
        """So many over each API. What they have begun they end."""
        self._over.clear()
        threads = [
            threading.Thread(target=self._call, args=(number, ask), daemon=True)
            for ask in (self._over_grpc, self._over_http)
            for number in range(callers)
        ]
        with running(threads, self._over):
            yield


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

    def wanted() -> int:
        scaling = view(None, scraped(autoscaled)).scaling
        return 0 if scaling is None else scaling.wanted

    with crowd.calling(CROWD):
        wait_until(lambda: wanted() == 2, HANG_GUARD_S, "a second one called for", 0.5)
    with crowd.calling(FEW):  # what loads has to share the cores with them
        wait_until(lambda: capacity(autoscaled) == 2 * HELD + QUEUE, HANG_GUARD_S, "room of two replicas", 0.5)
        wait_until(lambda: len(loads(autoscaled)) == 2, HANG_GUARD_S, "two replicas", 0.5)
    with crowd.calling(CROWD):
        wait_until(lambda: all(load["running"] for load in loads(autoscaled)), HANG_GUARD_S, "both busy", 0.5)
        seen = scraped(autoscaled)
    print(f"a crowd of {2 * CROWD}: {dict(crowd.outcomes)}")
    assert crowd.wrong == []
    assert crowd.outcomes["refused"], "a crowd that one replica has room for shows nothing"
    assert seen.sum("outrider:refused_generations_total", by="proxy"), "refusals are what tells of it"
    scaling = view(None, seen).scaling
    assert scaling is not None
    assert (scaling.wanted, scaling.most) == (2, 2)

    few, quick = Callers(autoscaled, LONG_ANSWER_TOKENS), Callers(autoscaled, SHORT_ANSWER_TOKENS)
    before_it_left: list[dict[str, Any]] = []

    def one_is_left() -> bool:
        nonlocal before_it_left
        now = loads(autoscaled)
        if len(now) == 2:
            before_it_left = now
        return len(now) == 1

    with few.calling(1), quick.calling(1):
        wait_until(one_is_left, HANG_GUARD_S, "one replica taken away", 0.2)
        wait_until(lambda: len(autoscaled.replicas()) == 1, HANG_GUARD_S, "its end", 0.5)
        wait_until(lambda: capacity(autoscaled) == HELD + QUEUE, HANG_GUARD_S, "room of one replica", 0.5)
    print(f"long answers: {few.outcomes}, short ones: {quick.outcomes}, last seen on two replicas: {before_it_left}")
    for callers in (few, quick):
        assert callers.wrong == []
        assert set(callers.outcomes) == {"finished"}

    def told() -> bool:
        scaling = view(None, scraped(autoscaled)).scaling
        return scaling is not None and (scaling.wanted, scaling.running) == (1, 1)

    wait_until(told, HANG_GUARD_S, "the metrics of it", 0.5)


def test_a_board_of_refusals_that_is_lost_is_made_anew(autoscaled: Deployment) -> None:
    name = board_name(autoscaled.config.serving.app_name)
    wait_until(lambda: view(None, scraped(autoscaled)).scaling, HANG_GUARD_S, "word of a board", 0.5)
    lost = ray.get_actor(name, namespace=NAMESPACE)
    ray.kill(lost)
    wait_until(lambda: view(None, scraped(autoscaled)).scaling is None, HANG_GUARD_S, "no word of it", 0.2)
    wait_until(lambda: view(None, scraped(autoscaled)).scaling, HANG_GUARD_S, "word of another", 0.5)
    assert ray.get_actor(name, namespace=NAMESPACE) != lost
    assert len(autoscaled.replicas()) == 1
