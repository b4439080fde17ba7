"""Target replicas follow the load: a second one comes when more is asked for than one can do, and leaves when it is not
needed any more, while requests run on both and others come."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from ray import serve

from outrider.actors.serve_adapter.broadcast import broadcast
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Deployments, Models, engine, wait_until
from tests.support.load.callers import KINDS, Clients, summary, violations

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


AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def callers(deployment: Deployment, number: int, tokens: int) -> Clients:
    """Return so many callers over each API, whose answers have so many tokens. Those that are refused ask again."""
    greedy, options = KINDS[:1], {"leave": 0.0, "again": AGAIN, "http_every": 2}
    return Clients(deployment, 2 * number, seed=1, kinds=greedy, lengths=(tokens,), **options)


def loads(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the loads of the replicas that get requests."""
    handle = serve.get_deployment_handle("Target", deployment.config.serving.app_name)
    replies = asyncio.run(broadcast(handle, "status", timeout_s=30.0))
    return [reply.value["target"] for reply in replies if reply.ok]


def test_a_second_replica_comes_with_the_load_and_leaves_with_it(autoscaled: Deployment) -> None:
    assert len(autoscaled.replicas()) == 1
    calls = []
    for number, condition, what in (
        (CROWD, lambda: len(autoscaled.replicas()) == 2, "a second one started"),
        (FEW, lambda: len(loads(autoscaled)) == 2, "two replicas"),  # what loads shares the cores with them
        (CROWD, lambda: all(load["running"] for load in loads(autoscaled)), "both busy"),
    ):
        with callers(autoscaled, number, ANSWER_TOKENS) as clients:
            wait_until(condition, HANG_GUARD_S, what, 0.5)
        calls += clients.calls
    print(f"a crowd: {summary(calls)}")
    assert violations(autoscaled, calls, None, may_be_refused=True) == []

    with callers(autoscaled, 1, LONG_ANSWER_TOKENS) as few, callers(autoscaled, 1, SHORT_ANSWER_TOKENS) as quick:
        wait_until(lambda: len(loads(autoscaled)) == 1, HANG_GUARD_S, "one replica taken away", 0.2)
        wait_until(lambda: len(autoscaled.replicas()) == 1, HANG_GUARD_S, "its end", 0.5)
    calls = [*few.calls, *quick.calls]
    print(f"long answers and short ones: {summary(calls)}")
    assert violations(autoscaled, calls, None) == []
