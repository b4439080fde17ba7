"""Collects what ``/metrics`` shows: the ingress' own counts, and the metrics of each replica under its name.

Every replica returns prometheus_client's metric families, vLLM's and ours. The ingress labels each sample with its
replica and aggregates nothing; PromQL does that. Prometheus scrapes one address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.actors.observability import catalog
from outrider.actors.replica_calls import ReplicaReply
from outrider.cluster.installed import VLLM, installed_version

logger = logging.getLogger("ray.serve.outrider.target")

FRESH_FOR_S = ANSWER_WITHIN_S = 1.0

CANCELLED = "CANCELLED"
"""Status of a call whose client left before its end."""

Ask = Callable[[], Awaitable[Mapping[str, Any]]]

disable_created_metrics()  # they double the number of series

INGRESS = CollectorRegistry()
"""Holds what this process' ingress counts, gRPC calls and HTTP requests alike."""

_CALLS = "Calls ended, by API (grpc, http, in_process) and status."
_REJECTED = "Requests refused before they reached an engine."
REQUESTS = Counter("outrider:requests", _CALLS, ["api", "method", "code"], registry=INGRESS)
IN_FLIGHT = Gauge("outrider:requests_in_flight", "Calls under way.", ["api"], registry=INGRESS)
REJECTIONS = Counter("outrider:admission_rejections", _REJECTED, ["reason"], registry=INGRESS)
REJECTIONS.labels("queue_full")


class CountRequests:
    """Counts each HTTP request, as ASGI middleware, by path and status when its response has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, code = "", CANCELLED

        async def note_status(message: Message) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                code = status

        with IN_FLIGHT.labels("http").track_inprogress():
            try:
                await self._app(scope, receive, note_status)
            except Exception:
                code = "500"
                raise
            finally:
                # The route's pattern: a path is the client's own choice, and every one would be a series.
                REQUESTS.labels("http", getattr(scope.get("route"), "path", "unmatched"), code).inc()
                if status == "429":
                    REJECTIONS.labels("queue_full").inc()


class ReplicaMetrics:
    """Collects the metrics of one replica.

    The Verifier is asked once a second at most; a scrape does not wait for a long step.

    Args:
        model_name: the label, as in vLLM's own metrics.
        ask_verifier: returns ``{"rounds": Round.metrics(), "link": LinkKeeper.status()}``; None without our drafter.
        ask_drafter: returns Drafter.status(); None likewise.
    """

    def __init__(
        self,
        model_name: str,
        ask_verifier: Ask | None,
        ask_drafter: Ask | None,
        *,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._model = {"model_name": model_name}
        self._ask_verifier, self._ask_drafter = ask_verifier, ask_drafter
        self._registry, self._clock, self._answer_within_s = registry, clock, answer_within_s
        self._asking: asyncio.Task[None] | None = None
        self._report: Mapping[str, Any] | None = None
        self._report_at = 0.0
        versions = {"version": installed_version("outrider"), "vllm": installed_version(*VLLM)}
        self._build = {**self._model, **versions, "ray": installed_version("ray")}

    async def families(self) -> list[Metric]:
        """Returns the metrics. Never fails: what does not answer in time is left out or old, and says so."""
        _, drafter = await asyncio.gather(self._refresh(), self._drafter())
        build = GaugeMetricFamily("outrider:build_info", "1; the versions are in the labels.")
        build.add_sample(build.name, self._build, 1)
        reports: list[tuple[Sequence[catalog.Spec], Mapping[str, Any]]] = []
        if self._report is not None:
            rounds, age = self._report["rounds"], {"snapshot_age": self._clock() - self._report_at}
            reports.append((catalog.ROUNDS, {**rounds, **rounds["histograms"], **rounds["lengths"], **age}))
            reports.append((catalog.LINK, self._report["link"]))
        if self._ask_drafter is not None:
            learning = (drafter or {}).get("learning") or {}
            reports.append((catalog.DRAFTER, {**(drafter or {}), "answered": int(drafter is not None)}))
            reports.append((catalog.LEARNING, learning))
            reports.append((catalog.TRAINER, learning.get("trainer") or {}))
        ours = [family for specs, report in reports for family in catalog.families(specs, report, self._model)]
        return [*self._registry.collect(), build, *ours]

    async def _refresh(self) -> None:
        """Asks the Verifier, or waits for the answer to the scrape before, but not long."""
        if self._ask_verifier is None or (self._report is not None and self._clock() - self._report_at < FRESH_FOR_S):
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._asked(self._ask_verifier))
        await asyncio.wait([self._asking], timeout=self._answer_within_s)

    async def _asked(self, ask: Ask) -> None:
        try:
            self._report, self._report_at = await ask(), self._clock()
        except Exception as error:  # noqa: BLE001 - the last numbers stand, and outrider:snapshot_age_seconds tells
            logger.warning("metrics: the verifier did not answer: %s", error)

    async def _drafter(self) -> Mapping[str, Any] | None:
        if self._ask_drafter is None:
            return None
        try:
            return await asyncio.wait_for(self._ask_drafter(), self._answer_within_s)
        except Exception as error:  # noqa: BLE001 - loading, stopped or gone: outrider:drafter_up tells
            logger.debug("metrics: the drafter did not answer: %s", error)
            return None


class ApplicationMetrics:
    """Makes one text of the answers of all replicas, and remembers which replicas there were the last time."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def text(self, replies: Sequence[ReplicaReply], ingresses: Iterable[Metric]) -> str:
        """Returns Prometheus' text. replies: families, or an error, of every replica. ingresses: the ingress' own."""
        answers = {reply.replica_id: reply.value for reply in replies if reply.replica_id and reply.ok}
        named = {reply.replica_id for reply in replies if reply.replica_id}
        num_silent = len(replies) - len(answers)
        # A silent replica does not always say who it is: while there is one, those that are missing are taken for it.
        self._known = named | (self._known if num_silent else set())
        up = GaugeMetricFamily("outrider:replica_up", "1 when the replica answered this scrape.", labels=["replica"])
        for replica in sorted(self._known):
            up.add_metric([replica], int(replica in answers))
        silent = GaugeMetricFamily("outrider:replicas_silent", "Running replicas that did not answer.", num_silent)
        labelled = [metric for name in sorted(answers) for metric in label(answers[name], replica=name)]
        return exposition([up, silent, *ingresses, *labelled])


def label(families: Iterable[Metric], **labels: str) -> Iterator[Metric]:
    """Yields the families with the labels on every sample."""
    for family in families:
        family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
        yield family


def exposition(families: Iterable[Metric]) -> str:
    """Returns Prometheus' text format, in which families of one name are one, with one HELP and one TYPE."""
    merged: dict[str, Metric] = {}
    for family in families:
        if (first := merged.setdefault(family.name, family)) is not family:
            first.samples.extend(family.samples)
    registry: Any = SimpleNamespace(collect=merged.values)
    return generate_latest(registry).decode()
