"""Lists the metrics of a replica: name, help and label of each, and where its value is in what processes report.

vLLM's own metrics (``vllm:*``) come from vLLM's registry, the ingress' are in metrics.py. Times are in seconds, shares
are ratios from 0 to 1. docs/operations.md says what the labels' values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider.actors.observability.histogram import HistogramSnapshot

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Spec:
    """Describes one metric.

    Args:
        read: a key of the report, keys by the label's values, or a function of the report. The value is a number, for a
            histogram a HistogramSnapshot; with a label, a mapping from the label's values to such. A report that lacks
            the key says nothing of the metric.
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    help: str
    read: str | Mapping[str, str] | Callable[[Report], Any]
    label: str | None = None

    def family(self, report: Report, constant: Mapping[str, str]) -> Metric:
        """Returns the metric with the report's samples. constant: labels that every sample gets."""
        value, own = self._value(report), [self.label] if self.label is not None else []
        family = self.kind(self.name, self.help, labels=[*constant, *own])
        samples = value if self.label is not None else {} if value is None else {None: value}
        for key, each in samples.items():
            labels = [*constant.values(), *([str(key)] if own else [])]
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, _buckets(each), each["sum"])
            else:
                family.add_metric(labels, each)
        return family

    def _value(self, report: Report) -> Any:
        if isinstance(self.read, str):
            return report.get(self.read, {} if self.label is not None else None)
        if isinstance(self.read, Mapping):
            return {label: report[key] for label, key in self.read.items() if key in report}
        return self.read(report)


def families(specs: Iterable[Spec], report: Report, constant: Mapping[str, str]) -> Iterator[Metric]:
    """Yields those of the metrics of which the report says something."""
    return (family for spec in specs if (family := spec.family(report, constant)).samples)


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True))


def _states(link: Report) -> dict[str, int]:
    return {state: int(link["state"] == state) for state in ("connecting", "up", "down")}


def _backend(link: Report) -> dict[str, int]:
    return {link["backend"]: 1} if link["backend"] else {}


def _gains(trainer: Report) -> dict[str, float]:
    verdict = trainer.get("last_verdict") or {}
    return {texts: compared["mean"] for texts, compared in verdict.items() if isinstance(compared, Mapping)}


_counter = partial(Spec, CounterMetricFamily)
_gauge = partial(Spec, GaugeMetricFamily)
_histogram = partial(Spec, HistogramMetricFamily)

ORIGINS = {"main_line": "main_line_hits", "side_branch": "side_branch_hits", "miss": "misses"}
RATES = {"speculative": "expected_rate", "plain": "expected_plain_rate"}
DROPPED = {"stale": "stale", "unusable": "unusable"}
TRAFFIC = {"sent": "bytes_sent", "received": "bytes_received"}

ROUNDS = (
    _gauge("outrider:snapshot_age_seconds", "Age of the verifier's numbers in this scrape.", "snapshot_age"),
    _counter("outrider:rounds_total", "Rounds verified; a step of three requests is three rounds.", "rounds"),
    _counter("outrider:drafted_rounds_total", "Rounds in which at least one draft was verified.", "drafted_rounds"),
    _counter("outrider:late_rounds_total", "Rounds decoded plainly: their proposals were late.", "late_rounds"),
    _counter("outrider:proposals_total", "Proposals with drafts that arrived.", "proposals"),
    _counter("outrider:foreseen_total", "Of these, those that were sent before the commit and used.", "foreseen"),
    _counter("outrider:path_rounds_total", "Rounds that verified further paths of a draft tree.", "path_rounds"),
    _counter("outrider:path_rows_total", "These paths; each is a row of the target's batch.", "path_rows"),
    _counter("outrider:path_tokens_total", "Tokens that they brought beyond the main line's.", "path_tokens"),
    _counter("outrider:chain_requests_total", "Requests that verify one path for a reason.", "chain", "reason"),
    _counter("outrider:proposal_bytes_total", "Bytes of the frames that carried proposals.", "proposal_bytes"),
    _counter("outrider:proposal_origins_total", "Answers to commits, by where drafts were.", ORIGINS, "origin"),
    _counter("outrider:refused_proposals_total", "Commits answered without drafts.", "refused", "reason"),
    _counter("outrider:dropped_proposals_total", "Proposals that could not be used.", DROPPED, "reason"),
    _counter("outrider:degraded_requests_total", "Requests that lost speculation for a time.", "degraded", "reason"),
    _counter("outrider:picture_requests_total", "Requests whose prompt holds pictures.", "picture_requests"),
    _histogram("outrider:step_seconds", "Decode steps, from start to start.", "period"),
    _histogram("outrider:step_target_seconds", "Of it the target's forward pass and verification.", "target"),
    _histogram("outrider:step_draft_seconds", "Of it the drafter's work that was waited for.", "draft"),
    _histogram("outrider:proposal_wait_seconds", "Of it waiting for proposals.", "wait"),
    _counter("outrider:chosen_lengths_total", "Rounds by the number of drafts wanted, 0 too.", "wanted", "k"),
    _counter(
        "outrider:length_controller_failures_total",
        "Errors of the length controller; drafting ends with the first.",
        "length_controller_failures",
    ),
    _gauge("outrider:speculating", "1 while drafting is expected to pay.", "speculating"),
    _counter("outrider:speculation_switches_total", "Speculation switched on or off for all requests.", "switches"),
    _gauge("outrider:expected_tokens_per_second", "What the length controller expects.", RATES, "mode"),
)
"""Read from Round.metrics(), its histograms and lengths beside the rest. A fixed length has none of the last three."""

LINK = (
    _gauge("outrider:link_state", "1 for the link's present state, 0 for the others.", _states, "state"),
    _gauge("outrider:link_backend", "1 for the transport of the link that is up.", _backend, "backend"),
    _gauge("outrider:link_epoch", "Number of the current link; every new one has a greater.", "epoch"),
    _counter("outrider:link_reconnects_total", "Links made anew after the first.", "reconnects"),
    _gauge("outrider:link_rtt_seconds", "Median ping when the link came up.", lambda link: link["rtt_us"] / 1e6),
    _counter("outrider:link_bytes_total", "Bytes over the current link.", TRAFFIC, "direction"),
)
"""Read from LinkKeeper.status(), whose traffic is missing before the first link."""

DRAFTER = (
    _gauge("outrider:drafter_up", "1 when the replica's drafter answered this scrape.", "answered"),
    _gauge("outrider:drafter_sequences", "Sequences held, for all targets linked to it.", "num_sequences"),
    _gauge("outrider:drafter_prefilling_sequences", "Of these, waiting for their prefill.", "num_prefilling"),
    _gauge("outrider:drafter_side_branches", "Side branches drafted ahead and held now.", "num_side_branches"),
    _gauge("outrider:drafter_kv_cache_usage_ratio", "Share of the drafter's KV blocks in use.", "kv_cache_usage"),
    _gauge("outrider:drafter_links", "Targets linked to this drafter.", "links"),
    _counter("outrider:drafter_draft_tokens_total", "Draft tokens it sent.", "drafted"),
    _histogram("outrider:drafter_step_seconds", "Draft steps, without prefill.", "step_seconds"),
    _counter("outrider:drafter_chosen_total", "Commits that each method's drafts answered.", "chosen", "method"),
    _counter("outrider:draft_vocabulary_tokens_total", "Tokens looked up in a cut vocabulary.", "vocabulary_observed"),
    _counter("outrider:draft_vocabulary_misses_total", "Of these, those not in it.", "vocabulary_missed"),
    _gauge("outrider:suffix_cached_requests", "Requests in the suffix drafter's cache.", "suffix_cached_requests"),
    _gauge("outrider:suffix_cached_tokens", "Tokens of their answers.", "suffix_cached_tokens"),
)
"""Read from Drafter.status(); a method leaves out what it does not have."""

LEARNING = (
    _gauge("outrider:drafter_version", "Version that drafts; 0 is the drafter as it was loaded.", "version"),
    _counter("outrider:drafter_refused_versions_total", "Versions that this drafter could not load.", "refused"),
    _counter("outrider:learning_failures_total", "Exchanges with the trainer that failed.", "failures"),
)
"""Read from the drafter's own part of Drafter.status()["learning"]."""

TRAINER = (
    _counter("outrider:learning_tokens_total", "Tokens of answers that the trainer was given.", "tokens"),
    _counter("outrider:learning_steps_total", "Training steps.", "steps"),
    _gauge("outrider:learning_loss", "Loss of the last training step.", "loss"),
    _counter("outrider:learning_adopted_total", "Versions that were better, and serve.", "adopted"),
    _counter("outrider:learning_withdrawn_total", "Versions rolled back: worse on later texts.", "withdrawn"),
    _counter("outrider:learning_reverted_total", "Versions that RevertDrafter replaced.", "reverted"),
    _counter("outrider:learning_refused_total", "Versions that the gate refused.", "refused", "reason"),
    _counter("outrider:learning_store_failures_total", "Versions that could not be stored.", "store_failures"),
    _gauge("outrider:learning_gain", "Gain in acceptance of the last version offered.", _gains, "texts"),
)
"""Read from the trainer's part, which every drafter of the trainer reports alike; empty until it has answered."""

CATALOG = {spec.name: spec for spec in (*ROUNDS, *LINK, *DRAFTER, *LEARNING, *TRAINER)}
