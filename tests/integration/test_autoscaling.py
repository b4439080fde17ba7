"""Target replicas follow the load: a second one comes when more is asked for than one can do, and leaves when it is not
needed any more, while requests run on both and others come."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import grpc
import pytest
from ray import serve

from outrider.actors.serve_adapter.broadcast import broadcast
from outrider.deploy.client.sync_client import OutriderError
from tests.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.traffic import running

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SEATS, HELD, QUEUE = 6, 8, 8
CROWD = HELD
"""Callers over gRPC, and as many over HTTP: together more than one replica takes, and no more than the queue holds."""

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


def loads(deployment: Deployment) -> list[dict[str, Any]]:
    """Of the replicas that get requests."""
    handle = serve.get_deployment_handle("Target", deployment.config.serving.app_name)
    replies = asyncio.run(broadcast(handle, "status", timeout_s=30.0))
    return [reply.value["target"] for reply in replies if reply.ok]


def test_a_second_replica_comes_with_the_load_and_leaves_with_it(autoscaled: Deployment) -> None:
    assert len(autoscaled.replicas()) == 1
    crowd = Callers(autoscaled, ANSWER_TOKENS)
    with crowd.calling(CROWD):
        wait_until(lambda: len(autoscaled.replicas()) == 2, HANG_GUARD_S, "a second one started", 0.5)
    with crowd.calling(FEW):  # what loads has to share the cores with them
        wait_until(lambda: len(loads(autoscaled)) == 2, HANG_GUARD_S, "two replicas", 0.5)
    with crowd.calling(CROWD):
        wait_until(lambda: all(load["running"] for load in loads(autoscaled)), HANG_GUARD_S, "both busy", 0.5)
    print(f"a crowd of {2 * CROWD}: {dict(crowd.outcomes)}")
    assert crowd.wrong == []
    assert crowd.outcomes["finished"]

    few, quick = Callers(autoscaled, LONG_ANSWER_TOKENS), Callers(autoscaled, SHORT_ANSWER_TOKENS)
    with few.calling(1), quick.calling(1):
        wait_until(lambda: len(loads(autoscaled)) == 1, HANG_GUARD_S, "one replica taken away", 0.2)
        wait_until(lambda: len(autoscaled.replicas()) == 1, HANG_GUARD_S, "its end", 0.5)
    print(f"long answers: {few.outcomes}, short ones: {quick.outcomes}")
    for callers in (few, quick):
        assert callers.wrong == []
        assert set(callers.outcomes) == {"finished"}
