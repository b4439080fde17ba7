"""An ingress that is taken down: what it refuses, what it finishes, and what it cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2

from outrider.actors.replica_calls import ReplicaReply
from outrider.actors.serving import running
from outrider.actors.serving.draining import DRAIN, Drain, Draining
from outrider.actors.serving.failures import failure_of
from outrider.actors.serving.grpc.health import HealthCalls
from outrider.actors.serving.http.admin import AdminAddress, move_to_admin_port
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.cluster.limits import LimitsConfig
from outrider.deploy.ports import pick_free_port

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Answer:
    """A replica's stream of three messages; the second waits for `go_on`. Like Serve's, it can be cancelled."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cancelled = False

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        yield 1
        await self.go_on.wait()
        yield 2
        yield 3

    def cancel(self) -> None:
        self.cancelled = True


def begun(drain: Drain) -> tuple[Answer, AsyncGenerator[Any, None]]:
    answer = Answer()
    return answer, running.retried(lambda avoid: answer, max_retries=1, request_id="r", drain=drain)


async def test_what_runs_is_finished_and_what_comes_is_refused() -> None:
    drain = Drain()
    answer, stream = begun(drain)
    assert await anext(stream) == 1
    assert drain.begin() == 1
    _, late = begun(drain)
    with pytest.raises(Draining):
        await anext(late)
    answer.go_on.set()
    assert [part async for part in stream] == [2, 3]
    assert drain.begin() == 0
    assert not answer.cancelled


async def test_what_is_left_is_cut_and_its_replica_told() -> None:
    drain = Drain()
    answer, stream = begun(drain)
    _, read = begun(drain)
    assert (await anext(stream), await anext(read)) == (1, 1)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert drain.cut() == 2
    for ended in (waiting, anext(read)):  # one waits for its replica, the other for its reader
        with pytest.raises(Draining):
            await ended
    assert (drain.left, answer.cancelled) == (0, True)
    await read.aclose()
    assert failure_of(Draining(), "request r", "r").code.name == "UNAVAILABLE"


async def test_a_reader_that_leaves_is_counted_no_longer() -> None:
    drain = Drain()
    answer, stream = begun(drain)
    await anext(stream)
    await stream.aclose()
    assert (drain.begin(), answer.cancelled) == (0, True)


async def test_a_timeout_of_the_answer_s_own_stays_one() -> None:
    drain = Drain()

    async def times_out() -> AsyncGenerator[int, None]:
        raise TimeoutError("its deadline")
        yield 0

    with pytest.raises(TimeoutError, match="its deadline"):
        await anext(drain.through(times_out()))


# Health.


class Health(HealthCalls):
    def __init__(self, *, well: bool) -> None:
        async def broadcast(*args: Any, timeout_s: float) -> list[ReplicaReply]:
            return [ReplicaReply("r") if well else ReplicaReply("r", error="broken")]

        self._target: Any = None
        self._broadcast: Any = broadcast
        self._health_poll = SharedPoll(self._ask_health)


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(DRAIN, "begun", True)


@pytest.mark.parametrize("well", [True, False])
async def test_liveness_is_the_process_s_and_readiness_the_replicas(well: bool) -> None:
    health = Health(well=well)
    ready = SERVING if well else NOT_SERVING
    assert [await health._health(name) for name in ("", "readiness", "liveness")] == [ready, ready, SERVING]


async def test_who_is_taken_down_is_alive_and_not_ready(draining: None) -> None:
    health = Health(well=True)
    assert [await health._health(name) for name in ("", "readiness", "liveness")] == [NOT_SERVING, NOT_SERVING, SERVING]


class Context:
    def set_code(self, code: Any) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: Any) -> None: ...

    def code(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()


async def test_a_watch_says_so_and_ends(draining: None) -> None:
    """It would use up all the time there is."""
    watch = Health(well=True).Watch(health_pb2.HealthCheckRequest(), Context())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        assert [response.status async for response in watch] == [NOT_SERVING]


async def test_a_watch_ends_when_serve_takes_its_replica_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: a rollout, a smaller number, a node that is drained. Another replica serves on."""
    monkeypatch.setattr(DRAIN, "_is_stopping", lambda: True)
    watch = Health(well=True).Watch(health_pb2.HealthCheckRequest(), Context())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        assert [response.status async for response in watch] == [SERVING]


# The admin port.


async def test_metrics_and_status_move_to_a_port_of_their_own() -> None:
    app = FastAPI()
    for path in ("/metrics", "/outrider/v1/status", "/livez", "/readyz", "/v1/models"):
        app.add_api_route(path, lambda: "here")
    address = AdminAddress("127.0.0.1", pick_free_port())
    move_to_admin_port(app, address, LimitsConfig())
    public = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://public")
    admin = httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", trust_env=False)
    async with app.router.lifespan_context(app), public, admin:
        for path, at_public, at_admin in (
            ("/metrics", 404, 200),
            ("/outrider/v1/status", 404, 200),
            ("/livez", 200, 200),
            ("/readyz", 200, 200),
            ("/v1/models", 200, 404),
        ):
            assert (await public.get(path)).status_code == at_public, path
            assert (await admin.get(path)).status_code == at_admin, path
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as again:
            await again.get(f"http://{address.host}:{address.port}/livez")
