"""``/metrics``: what an ingress counts, what a target replica reports, and both in one text for the application.

vLLM's metrics are in the replica's process and come as they are. The verifier's numbers are in rank 0, which answers
between two steps of the engine. So they are asked for once for all scrapes of a second, are counts and never computed
there, and a scrape does not wait for an engine that is busy with one very long step: it gets the last numbers and their
age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry

from outrider.actors.observability.exposition import Families, merge, render
from outrider.cluster.installed import VLLM, installed_version

logger = logging.getLogger("ray.serve.outrider.target")

FRESH_FOR_S = 1.0
ANSWER_WITHIN_S = 1.0

Ask = Callable[[], Awaitable[Mapping[str, Any]]]

CANCELLED = "CANCELLED"
"""Status of a call whose client left before its end."""

LINK_STATES = ("connecting", "up", "down")
ORIGINS = {"main_line": "main_line_hits", "side_branch": "side_branch_hits", "miss": "misses"}
"""Label -> its count in RoundStatistics."""

_STEP_PARTS = {
    "period": "outrider:step_seconds",
    "target": "outrider:step_target_seconds",
    "draft": "outrider:step_draft_seconds",
    "wait": "outrider:proposal_wait_seconds",
}
_DRAFTER_GAUGES = {
    "num_sequences": "outrider:drafter_sequences",
    "num_prefilling": "outrider:drafter_prefilling_sequences",
    "num_side_branches": "outrider:drafter_side_branches",
    "branch_blocks": "outrider:drafter_branch_blocks",
    "kv_cache_usage": "outrider:drafter_kv_cache_usage_ratio",
    "links": "outrider:drafter_links",
}
_DRAFTER_COUNTERS = {
    "steps": "outrider:drafter_steps_total",
    "rounds": "outrider:drafter_answers_total",
    "drafted": "outrider:drafter_draft_tokens_total",
    "vocabulary_observed": "outrider:draft_vocabulary_tokens_total",
    "vocabulary_missed": "outrider:draft_vocabulary_misses_total",
}
_SEVERAL = {
    "chosen": "outrider:drafter_chosen_total",
    "judged": "outrider:drafter_judged_drafts_total",
    "right": "outrider:drafter_right_drafts_total",
}
"""By method, of several drafters in one."""

_SUFFIX = {
    "suffix_cached_requests": "outrider:suffix_cached_requests",
    "suffix_cached_tokens": "outrider:suffix_cached_tokens",
    "suffix_parts_learnt": "outrider:suffix_parts_learnt_total",
    "suffix_parts_lost": "outrider:suffix_parts_lost_total",
    "suffix_pool_failures": "outrider:suffix_pool_failures_total",
}

_LEARNING = {
    "version": "outrider:drafter_version",
    "changes": "outrider:drafter_version_changes_total",
    "refused": "outrider:drafter_refused_versions_total",
    "failures": "outrider:learning_failures_total",
    "dropped_texts": "outrider:learning_dropped_texts_total",
}
_TRAINER = {
    "tokens": "outrider:learning_tokens_total",
    "steps": "outrider:learning_steps_total",
    "loss": "outrider:learning_loss",
    "adopted": "outrider:learning_adopted_total",
    "withdrawn": "outrider:learning_withdrawn_total",
    "reverted": "outrider:learning_reverted_total",
    "store_failures": "outrider:learning_store_failures_total",
}


class IngressMetrics:
    """Not thread-safe: for the ingress's event loop."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter({"queue_full": 0})

    @contextmanager
    def in_flight(self, api: str) -> Iterator[None]:
        """Around a call. api: ``grpc`` or ``http``."""
        self._in_flight[api] += 1
        try:
            yield
        finally:
            self._in_flight[api] -= 1

    def ended(self, api: str, method: str, code: str) -> None:
        """code: a gRPC status code's name or an HTTP status, or CANCELLED."""
        self._ended[api, method, code] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused before it reached an engine, such as ``queue_full``."""
        self._rejections[reason] += 1

    def text(self) -> str:
        families = Families()
        for (api, method, code), count in sorted(self._ended.items()):
            families.add("outrider:requests_total", count, api=api, method=method, code=code)
        for api, number in sorted(self._in_flight.items()):
            families.add("outrider:requests_in_flight", number, api=api)
        for reason, count in sorted(self._rejections.items()):
            families.add("outrider:admission_rejections_total", count, reason=reason)
        return render(families)


METRICS = IngressMetrics()
"""Of this process, as it has one ingress: gRPC calls and HTTP requests count in the same place."""


class ReplicaMetrics:
    """model_name: as in vLLM's label.

    ask_rank_0: ``{"rounds": Round.metrics(), "link": LinkKeeper.status()}``; None without a drafter of ours.
    ask_drafter: Drafter.status(); None likewise.
    """

    def __init__(
        self,
        model_name: str,
        ask_rank_0: Ask | None,
        ask_drafter: Ask | None,
        *,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._model_name = model_name
        self._ask_rank_0, self._ask_drafter = ask_rank_0, ask_drafter
        self._registry, self._clock, self._answer_within_s = registry, clock, answer_within_s
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None
        self._rank_0: Mapping[str, Any] | None = None
        self._rank_0_at = 0.0
        self._versions = {
            "version": installed_version("outrider"),
            "vllm": installed_version(*VLLM),
            "ray": installed_version("ray"),
        }

    async def text(self) -> str:
        """The exposition. Never fails: what does not answer in time is left out or old, and says so."""
        families = Families({"model_name": self._model_name})
        families.add("outrider:build_info", 1, **self._versions)
        _, drafter = await asyncio.gather(self._refresh(), self._drafter())
        if self._rank_0 is not None:
            families.add("outrider:snapshot_age_seconds", self._clock() - self._rank_0_at)
            add_rounds(families, self._rank_0["rounds"])
            add_link(families, self._rank_0["link"])
        if self._ask_drafter is not None:
            add_drafter(families, drafter)
        # In a thread: tokens of every request pass through this event loop.
        return await asyncio.to_thread(render, self._registry, families)

    async def _refresh(self) -> None:
        """Ask rank 0, or wait for the answer to the scrape before, but not long."""
        if self._ask_rank_0 is None or (self._rank_0 is not None and self._clock() - self._rank_0_at < FRESH_FOR_S):
            return
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask_rank_0())
            self._asking.add_done_callback(self._answered)
        await asyncio.wait([self._asking], timeout=self._answer_within_s)

    def _answered(self, asking: asyncio.Task[Mapping[str, Any]]) -> None:
        self._asking = None
        if asking.cancelled():
            return
        if (error := asking.exception()) is not None:
            logger.warning("metrics: the verifier did not answer: %s", error)
            return
        self._rank_0, self._rank_0_at = asking.result(), self._clock()

    async def _drafter(self) -> Mapping[str, Any] | None:
        if self._ask_drafter is None:
            return None
        try:
            return await asyncio.wait_for(self._ask_drafter(), self._answer_within_s)
        except Exception as error:  # noqa: BLE001 - loading, stopped or gone: outrider:drafter_up tells
            logger.debug("metrics: the drafter did not answer: %s", error)
            return None


def add_rounds(families: Families, rounds: Mapping[str, Any]) -> None:
    """rounds: Round.metrics()."""
    counted = ("rounds", "drafted_rounds", "late_rounds", "proposals", "foreseen", "proposal_bytes", "picture_requests")
    for name in counted:
        families.add(f"outrider:{name}_total", rounds[name])
    for origin, count in ORIGINS.items():
        families.add("outrider:proposal_origins_total", rounds[count], origin=origin)
    for reason, count in rounds["refused"].items():
        families.add("outrider:refused_proposals_total", count, reason=reason)
    for reason in ("stale", "unusable"):
        families.add("outrider:dropped_proposals_total", rounds[reason], reason=reason)
    for reason, count in rounds["degraded"].items():
        families.add("outrider:degraded_requests_total", count, reason=reason)
    for part, name in _STEP_PARTS.items():
        families.add_histogram(name, rounds["histograms"][part])
    for k, count in rounds["wanted"].items():
        families.add("outrider:chosen_lengths_total", count, k=k)
    families.add("outrider:length_controller_failures_total", rounds["length_controller_failures"])
    lengths = rounds["lengths"]
    if lengths:  # else the length is fixed
        families.add("outrider:speculating", float(lengths["speculating"]))
        families.add("outrider:speculation_switches_total", lengths["switches"])
        families.add("outrider:length_probes_total", lengths["probes"])
        families.add("outrider:expected_tokens_per_second", lengths["expected_rate"], mode="speculative")
        families.add("outrider:expected_tokens_per_second", lengths["expected_plain_rate"], mode="plain")


def add_link(families: Families, link: Mapping[str, Any]) -> None:
    """link: LinkKeeper.status(), whose traffic is missing before the first link."""
    for state in LINK_STATES:
        families.add("outrider:link_state", float(link["state"] == state), state=state)
    if link["backend"]:
        families.add("outrider:link_backend", 1.0, backend=link["backend"])
    families.add("outrider:link_epoch", link["epoch"])
    families.add("outrider:link_reconnects_total", link["reconnects"])
    families.add("outrider:link_rtt_seconds", link["rtt_us"] / 1e6)
    for direction in ("sent", "received"):
        families.add("outrider:link_bytes_total", link.get(f"bytes_{direction}", 0), direction=direction)
        families.add("outrider:link_frames_total", link.get(f"frames_{direction}", 0), direction=direction)


def add_drafter(families: Families, drafter: Mapping[str, Any] | None) -> None:
    """drafter: Drafter.status(), in which a method leaves out what it has not; None: it did not answer."""
    families.add("outrider:drafter_up", float(drafter is not None))
    if drafter is None:
        return
    for key, name in {**_DRAFTER_GAUGES, **_DRAFTER_COUNTERS, **_SUFFIX}.items():
        if key in drafter:
            families.add(name, drafter[key])
    for key, name in _SEVERAL.items():
        for method, count in drafter.get(key, {}).items():
            families.add(name, count, method=method)
    for target, steps in drafter.get("link_steps", {}).items():
        families.add("outrider:drafter_link_steps_total", steps, target=target)
    if "learning" in drafter:
        _add_learning(families, drafter["learning"])
    if "step_seconds" in drafter:
        of_each = drafter.get("steps_of", {"draft_model": drafter["step_seconds"]})
        for method, seconds in of_each.items():
            families.add_histogram("outrider:drafter_step_seconds", seconds, method=method)


def _add_learning(families: Families, learning: Mapping[str, Any]) -> None:
    """learning: LearningMember.status(). The trainer's part is empty until it has been heard of."""
    trainer = learning["trainer"]
    for where, names in ((learning, _LEARNING), (trainer, _TRAINER)):
        for key, name in names.items():
            if key in where:
                families.add(name, where[key])
    for reason, count in trainer.get("refused", {}).items():
        families.add("outrider:learning_refused_total", count, reason=reason)
    for texts in ("recent", "past", "general"):
        if (difference := (trainer.get("last_verdict") or {}).get(texts)) is not None:
            families.add("outrider:learning_gain", difference["mean"], texts=texts)
    for row in trainer.get("versions", ()):
        number = str(row["number"])
        families.add("outrider:learning_version_state", 1, version=number, state=row["state"])
        for texts, difference in {**(row["verdict"] or {}), "since": row["since"]}.items():
            if texts == "reason" or difference is None:
                continue
            families.add("outrider:learning_version_gain", difference["mean"], version=number, texts=texts)
            if difference["margin"] is not None:
                families.add("outrider:learning_version_margin", difference["margin"], version=number, texts=texts)


class Scraped(NamedTuple):
    """One replica's answer. A replica that was silent has no text, and may not have said who it is."""

    replica: str | None
    text: str | None


class ApplicationMetrics:
    """Scrapes that come while one is under way share its answer.

    ask_replicas: one answer for each replica that is running; raises nothing. own_text: of ingresses; likewise.
    """

    def __init__(
        self, ask_replicas: Callable[[], Awaitable[Sequence[Scraped]]], own_text: Callable[[], Awaitable[str]]
    ) -> None:
        self._ask_replicas, self._own_text = ask_replicas, own_text
        self._scraping: asyncio.Task[str] | None = None
        self._known: set[str] = set()
        """Replicas that answered, or were silent, the last time."""

    async def text(self) -> str:
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape())
        # A client that leaves must not take the answer from the others.
        return await asyncio.shield(self._scraping)

    async def _scrape(self) -> str:
        answers, own = await asyncio.gather(self._ask_replicas(), self._own_text())
        texts = {answer.replica: answer.text for answer in answers if answer.replica is not None and answer.text}
        num_silent = len(answers) - len(texts)
        # Who is silent does not always say who it is: while anyone is, those that are missed are taken for them.
        named = {answer.replica for answer in answers if answer.replica is not None}
        missing = (self._known | named if num_silent else named) - set(texts)
        self._known = set(texts) | missing
        families = Families()
        for replica in sorted(self._known):
            families.add("outrider:replica_up", float(replica in texts), replica=replica)
        families.add("outrider:replicas_silent", num_silent)
        merged = await asyncio.to_thread(merge, dict(sorted(texts.items())))
        return "".join((render(families), own, merged))
