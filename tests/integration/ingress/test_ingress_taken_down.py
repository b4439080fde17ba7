"""An ingress that Serve takes down, or whoever ends the server: on real Serve, before a scripted target."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from outrider.actors.serve_adapter.broadcast import broadcast
from outrider.actors.serve_adapter.ray_processes import is_stopping
from outrider.actors.serving.ingress import Ingress
from outrider.deploy.client.sync_client import OutriderClient
from tests.integration.ingress.calls import failure, wait_for
from tests.integration.ingress.conftest import owners
from tests.integration.ingress.stand_in_target import CONFIG, HANG_GUARD_S, stand_in_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

APP = "second"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def second(address: str, meeting_point: Path) -> Iterator[OutriderClient]:
    """Yield a client of an application of its own."""
    front = serve.deployment(
        Ingress, name="Ingress", max_ongoing_requests=100,
        graceful_shutdown_timeout_s=HANG_GUARD_S, graceful_shutdown_wait_loop_s=0.1,
    )  # fmt: skip
    target = stand_in_target(str(meeting_point))
    app = front.bind(target, CONFIG, broadcast=broadcast, authenticator=owners(), is_stopping=is_stopping, pool=None)
    serve.run(app, name=APP, route_prefix="/second")
    with OutriderClient(address, application=APP) as client:
        yield client
    serve.delete(APP)


def watch(channel: grpc.Channel) -> Iterator[health_pb2.HealthCheckResponse]:
    request = health_pb2.HealthCheckRequest()
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(request, metadata=[("application", APP)], timeout=HANG_GUARD_S)


def test_serve_lets_an_answer_end_and_a_watch_does_not_hold_it_up(
    second: OutriderClient, address: str, meeting_point: Path
) -> None:
    """As it does for a rollout, a smaller number of replicas, or a node that is drained."""
    with grpc.insecure_channel(address) as channel:
        watched = watch(channel)
        assert next(watched).status == SERVING
        stream = second.stream("wait", request_id="r-last", timeout_s=HANG_GUARD_S)
        assert next(stream).text_delta == "one "
        serve.delete(APP, _blocking=False)
        list(watched)  # ends by itself
        (meeting_point / "r-last.go").touch()
        assert [message.text_delta for message in stream][-1] == "three"
        wait_for(lambda: APP not in serve.status().applications)


def test_a_server_that_is_taken_down_refuses_what_comes_and_finishes_what_runs(
    second: OutriderClient, address: str, meeting_point: Path
) -> None:
    ingress = serve.get_deployment_handle("Ingress", APP)

    def drain() -> int:
        return sum(reply.value for reply in asyncio.run(broadcast(ingress, "drain", timeout_s=HANG_GUARD_S)))

    with grpc.insecure_channel(address) as channel:
        watched = watch(channel)
        assert next(watched).status == SERVING
        running = second.stream("wait", request_id="r-finished", timeout_s=HANG_GUARD_S)
        assert next(running).text_delta == "one "
        assert drain() == 1
        assert [each.status for each in watched] == [NOT_SERVING]
        refused = failure(lambda: second.generate("two", timeout_s=HANG_GUARD_S))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        (meeting_point / "r-finished.go").touch()
        assert [message.text_delta for message in running][-1] == "three"
        wait_for(lambda: drain() == 0)
