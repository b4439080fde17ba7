"""The application's metrics: who answers is merged, who is silent is named, the ingress counts its calls."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.actors.observability.http import CountRequests
from outrider.actors.observability.metrics import ApplicationMetrics, IngressMetrics, Scraped
from outrider.actors.replica_calls import ReplicaReply
from outrider.actors.serving.http.app import add_operator_routes
from tests.unit.observability.test_exposition import samples


def exposed(name, value):
    return f"# HELP {name} Something.\n# TYPE {name} gauge\n{name} {value}\n"


def application(*rounds):
    """Scrapes give the rounds one after the other."""
    waiting = list(rounds)

    async def ask():
        await asyncio.sleep(0)
        return waiting.pop(0)

    async def own():
        return exposed("own", 1)

    return ApplicationMetrics(ask, own), waiting


async def test_texts_are_merged_beside_the_ingress_s_own():
    metrics, _ = application([Scraped("a", exposed("x", 1)), Scraped("b", exposed("x", 2))])
    assert samples(await metrics.text()) == {
        ("outrider:replica_up", ("replica", "a")): 1,
        ("outrider:replica_up", ("replica", "b")): 1,
        ("outrider:replicas_silent",): 0,
        ("own",): 1,
        ("x", ("replica", "a")): 1,
        ("x", ("replica", "b")): 2,
    }


async def test_a_silent_replica_is_down_for_as_long_as_it_is_silent():
    both = [Scraped("a", exposed("x", 1)), Scraped("b", exposed("x", 2))]
    late = [Scraped("a", exposed("x", 1)), Scraped(None, None)]
    metrics, _ = application(both, late, late, [Scraped("a", exposed("x", 1))])
    await metrics.text()
    for _ in range(2):
        values = samples(await metrics.text())
        assert values["outrider:replica_up", ("replica", "b")] == 0
        assert values["outrider:replicas_silent",] == 1
        assert ("x", ("replica", "b")) not in values
    values = samples(await metrics.text())
    assert ("outrider:replica_up", ("replica", "b")) not in values, "it was scaled down, and is not missed"


async def test_a_replica_that_fails_by_name_is_down_at_once():
    metrics, _ = application([Scraped("a", None)])
    assert samples(await metrics.text())["outrider:replica_up", ("replica", "a")] == 0


async def test_scrapes_at_the_same_time_share_one_answer():
    metrics, waiting = application([Scraped("a", exposed("x", 1))], [Scraped("a", exposed("x", 2))])
    texts = await asyncio.gather(metrics.text(), metrics.text())
    assert texts[0] == texts[1]
    assert len(waiting) == 1


async def test_a_pool_without_drafters_is_no_silent_replica():
    texts, app = {"target": {"t": exposed("x", 1)}, "pool": {"p": exposed("x", 2)}}, FastAPI()

    async def broadcast(deployment, method, timeout_s):
        if not texts[deployment]:
            raise DeploymentUnavailableError(DeploymentID(deployment, "app"))
        return [ReplicaReply(replica, text) for replica, text in texts[deployment].items()]

    class Ingress:
        async def all_metrics_text(self):
            return ""

    add_operator_routes(app, Ingress(), "target", "pool", broadcast)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:

        async def scraped():
            return {key: value for key, value in samples((await client.get("/metrics")).text).items() if key[0] != "x"}

        both = {("outrider:replica_up", ("replica", name)): 1 for name in "tp"}
        assert await scraped() == {**both, ("outrider:replicas_silent",): 0}
        texts["pool"] = {}
        target = {("outrider:replica_up", ("replica", "t")): 1}
        assert await scraped() == {**target, ("outrider:replicas_silent",): 0}, "its last one was taken away"
        texts["target"] = {}
        assert await scraped() == {("outrider:replica_up", ("replica", "t")): 0, ("outrider:replicas_silent",): 1}


@pytest.fixture
def counted():
    app, metrics = FastAPI(), IngressMetrics()

    @app.get("/thing/{name}")
    async def thing(name: str) -> Response:
        if name == "broken":
            raise RuntimeError("broken on purpose")
        return Response(status_code=429 if name == "full" else 200)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            assert samples(metrics.text())["outrider:requests_in_flight", ("api", "http")] == 1
            yield b"a"
            yield b"b"

        return StreamingResponse(parts())

    app.add_middleware(CountRequests, metrics=metrics)
    return app, metrics


async def test_http_requests_count_by_route_and_status(counted):
    app, metrics = counted
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in ("/thing/a", "/thing/b", "/thing/full", "/thing/broken", "/nowhere/at/all", "/stream"):
            await client.get(path)
    values = samples(metrics.text())
    ended = {
        (dict(key[1:])["method"], dict(key[1:])["code"]): value
        for key, value in values.items()
        if key[0] == "outrider:requests_total"
    }
    assert ended == {
        ("/thing/{name}", "200"): 2,
        ("/thing/{name}", "429"): 1,
        ("/thing/{name}", "500"): 1,
        ("unmatched", "404"): 1,
        ("/stream", "200"): 1,
    }
    assert values["outrider:admission_rejections_total", ("reason", "queue_full")] == 1
    assert values["outrider:requests_in_flight", ("api", "http")] == 0


async def test_a_client_that_leaves_counts_as_cancelled():
    metrics = IngressMetrics()
    started = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        await asyncio.Event().wait()

    async def send(message): ...

    call = asyncio.create_task(CountRequests(app, metrics)({"type": "http"}, None, send))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert 'code="CANCELLED"' in metrics.text()
