"""Metrics: all that processes report is exported, replicas are told apart, silence is told, calls are counted."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry, Gauge
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.actors.observability import catalog
from outrider.actors.observability.catalog import CATALOG
from outrider.actors.observability.histogram import Histogram
from outrider.actors.observability.metrics import INGRESS, REQUESTS, CountRequests, ReplicaMetrics, exposition
from outrider.actors.replica_calls import ReplicaReply
from outrider.actors.round.length import LengthController
from outrider.actors.serving.http.app import add_operator_routes
from outrider.cluster.link.messages import DraftOrigin
from tests.unit.observability.exported import parse, samples
from tests.unit.round.scripted_link import Engine

M = ("model_name", "m")
DRAFTER_STATUS = {
    **dict.fromkeys(("num_sequences", "num_prefilling", "num_side_branches", "links", "drafted"), 3),
    **{spec.read: 4 for spec in catalog.DRAFTER if spec.name.startswith("outrider:suffix")},
    "kv_cache_usage": 0.25,
    "vocabulary_observed": 100,
    "vocabulary_missed": 7,
    "step_seconds": Histogram().snapshot(),
    "chosen": {"draft_model": 6, "ngram": 2},
    "learning": {
        "version": 3,
        "refused": 1,
        "failures": 2,
        "trainer": {
            **dict.fromkeys(("tokens", "steps", "loss", "adopted", "withdrawn", "reverted", "store_failures"), 5),
            "refused": {"no_gain": 2},
            "last_verdict": {"reason": "gain", "recent": {"mean": 0.05}, "past": {"mean": -0.01}, "general": None},
        },
    },
}
LINK_STATUS = {
    "state": "up", "epoch": 2, "drafter": "Drafter:a", "reconnects": 1, "rtt_us": 150.0, "last_error": "",
    "backend": "local", "bytes_sent": 10, "bytes_received": 20,
}  # fmt: skip


def rank_0():
    """Rounds with a bit of everything, as the Verifier reports them."""
    engine = Engine(lengths=LengthController(4))
    engine.begin("a", "b")
    engine.round.reset_statistics()
    for _ in range(2):
        engine.step({"a": [5], "b": [6]}, {"a": [1, 2]})
    engine.round.statistics.count_answer(DraftOrigin.MAIN_LINE, 900)
    engine.round.proposal_was_bad("a")
    return {"rounds": engine.round.metrics(), "link": LINK_STATUS}


def replica(ask_verifier=None, ask_drafter=None, clock=lambda: 0.0, registry=None, **options):
    async def drafter():
        return DRAFTER_STATUS

    async def verifier():
        return rank_0()

    registry = registry or CollectorRegistry()
    return ReplicaMetrics(
        "m", ask_verifier or verifier, ask_drafter or drafter, registry=registry, clock=clock, **options
    )


async def scraped(metrics):
    return samples(exposition(await metrics.families()))


async def test_all_that_is_reported_is_exported():
    text = exposition(await replica().families())
    assert {
        ("outrider:rounds_total", M): 4,
        ("outrider:drafted_rounds_total", M): 2,
        ("outrider:proposal_origins_total", M, ("origin", "main_line")): 1,
        ("outrider:proposal_origins_total", M, ("origin", "miss")): 0,
        ("outrider:dropped_proposals_total", M, ("reason", "unusable")): 1,
        ("outrider:degraded_requests_total", M, ("reason", "no_link")): 2,
        ("outrider:step_seconds_count", M): 1,
        ("outrider:link_state", M, ("state", "up")): 1,
        ("outrider:link_state", M, ("state", "down")): 0,
        ("outrider:link_backend", ("backend", "local"), M): 1,
        ("outrider:link_rtt_seconds", M): pytest.approx(150e-6),
        ("outrider:link_bytes_total", ("direction", "received"), M): 20,
        ("outrider:drafter_kv_cache_usage_ratio", M): 0.25,
        ("outrider:learning_refused_total", M, ("reason", "no_gain")): 2,
        ("outrider:learning_gain", M, ("texts", "past")): -0.01,
    }.items() <= samples(text).items()
    families = parse(text)
    # Every one, but for reasons that have not come up.
    assert {name.removesuffix("_total") for name in CATALOG} - set(families) == {
        "outrider:refused_proposals",
        "outrider:chain_requests",
    }
    assert all(family.documentation.endswith(".") for family in families.values())


async def test_scrapes_of_one_moment_ask_the_verifier_once_and_do_not_wait_for_a_busy_engine():
    asked, now, free = [], 0.0, asyncio.Event()
    free.set()

    async def ask():
        asked.append(now)
        await free.wait()
        return rank_0()

    metrics = replica(ask, clock=lambda: now, answer_within_s=0.01)
    await asyncio.gather(metrics.families(), metrics.families())
    await metrics.families()
    assert len(asked) == 1
    free.clear()
    now = 7.0
    for _ in range(2):
        values = await scraped(metrics)
        assert values["outrider:snapshot_age_seconds", M] == 7
        assert values["outrider:rounds_total", M] == 4
    free.set()
    await asyncio.sleep(0.01)
    assert (await scraped(metrics))["outrider:snapshot_age_seconds", M] == 0
    assert len(asked) == 2


async def test_a_drafter_that_is_gone_is_down_and_has_no_load():
    async def gone():
        raise ConnectionError("gone")

    values = await scraped(replica(gone, gone))
    assert values["outrider:drafter_up", M] == 0
    assert {key[0] for key in values} == {"outrider:drafter_up", "outrider:build_info"}


@pytest.fixture
def application():
    """Replicas by deployment, and a function that scrapes them."""
    replicas, app = {"target": {"t": 1, "u": 2}, "pool": {"p": 3}}, FastAPI()

    async def broadcast(deployment, method, timeout_s):
        if not replicas[deployment]:
            raise DeploymentUnavailableError(DeploymentID(deployment, "app"))
        return [
            ReplicaReply(None, error="late") if value is None else ReplicaReply(name, gauges(x=value))
            for name, value in replicas[deployment].items()
        ]

    class Ingress:
        async def all_metrics(self):
            return gauges(own=1)

    async def scrape():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return samples((await client.get("/metrics")).text)

    add_operator_routes(app, Ingress(), "target", "pool", broadcast)
    return replicas, scrape


def gauges(**values):
    registry = CollectorRegistry()
    for name, value in values.items():
        Gauge(name, "Something.", registry=registry).set(value)
    return list(registry.collect())


def up(values):
    return {key[1][1]: value for key, value in values.items() if key[0] == "outrider:replica_up"}


async def test_samples_carry_their_replica_s_name_and_a_silent_replica_is_down_while_it_is_silent(application):
    replicas, scrape = application
    values = await scrape()
    assert {key: value for key, value in values.items() if not key[0].startswith("outrider")} == {
        ("own",): 1,
        ("x", ("replica", "t")): 1,
        ("x", ("replica", "u")): 2,
        ("x", ("replica", "p")): 3,
    }
    assert (up(values), values["outrider:replicas_silent",]) == ({"t": 1, "u": 1, "p": 1}, 0)
    replicas["target"]["u"] = None
    for _ in range(2):
        values = await scrape()
        assert (up(values), values["outrider:replicas_silent",]) == ({"t": 1, "u": 0, "p": 1}, 1)
    del replicas["target"]["u"]
    assert up(await scrape()) == {"t": 1, "p": 1}, "it was scaled down, and is not missed"
    replicas["pool"] = {}
    values = await scrape()
    assert (up(values), values["outrider:replicas_silent",]) == ({"t": 1}, 0), "a pool may have no drafters"
    replicas["target"] = {}
    values = await scrape()
    assert (up(values), values["outrider:replicas_silent",]) == ({"t": 0}, 1), "there must be a target"


@pytest.fixture
def counted():
    """Return the values of an ingress that has counted nothing."""
    REQUESTS.clear()
    return lambda: samples(exposition(INGRESS.collect()))


async def test_http_requests_count_by_route_and_status(counted):
    app = FastAPI()

    @app.get("/thing/{name}")
    async def thing(name: str) -> Response:
        if name == "broken":
            raise RuntimeError("broken on purpose")
        return Response(status_code=429 if name == "full" else 200)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            assert counted()["outrider:requests_in_flight", ("api", "http")] == 1
            yield b"a"

        return StreamingResponse(parts())

    app.add_middleware(CountRequests)
    rejected = "outrider:admission_rejections_total", ("reason", "queue_full")
    before, transport = counted()[rejected], httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in ("/thing/a", "/thing/b", "/thing/full", "/thing/broken", "/nowhere/at/all", "/stream"):
            await client.get(path)
    found = {key[2:]: value for key, value in counted().items() if key[0] == "outrider:requests_total"}
    assert {(code, method): value for ((_, code), (_, method)), value in found.items()} == {
        ("200", "/thing/{name}"): 2,
        ("429", "/thing/{name}"): 1,
        ("500", "/thing/{name}"): 1,
        ("404", "unmatched"): 1,
        ("200", "/stream"): 1,
    }
    assert counted()[rejected] == before + 1
    assert counted()["outrider:requests_in_flight", ("api", "http")] == 0
