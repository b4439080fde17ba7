"""Every metric of ours: name, type, labels and help. What is not in here cannot be exported.

Names are as a scrape shows them. vLLM's own metrics (``vllm:*``) come from vLLM and are not listed. Times are seconds,
shares are ratios from 0 to 1. Those of a replica carry ``model_name``, as vLLM's do, and get ``replica`` when the
replicas' texts are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricSpec:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and nothing else, end in _total")


ROUNDS = (
    MetricSpec("outrider:rounds_total", "counter", "Rounds verified; a step of three requests is three rounds."),
    MetricSpec("outrider:drafted_rounds_total", "counter", "Rounds in which at least one draft was verified."),
    MetricSpec(
        "outrider:late_rounds_total", "counter", "Rounds decoded plainly because their proposals missed the deadline."
    ),
    MetricSpec("outrider:proposals_total", "counter", "Proposals with drafts that arrived, some ahead of an outcome."),
    MetricSpec(
        "outrider:foreseen_total",
        "counter",
        "Of these, ahead of their round's outcome, which came: the drafter was not asked.",
    ),
    MetricSpec("outrider:proposal_bytes_total", "counter", "Bytes of the frames that carried them, headers included."),
    MetricSpec(
        "outrider:proposal_origins_total",
        "counter",
        "Answers to commits by origin: main_line and side_branch were drafted ahead, a miss was not.",
        ("origin",),
    ),
    MetricSpec(
        "outrider:refused_proposals_total",
        "counter",
        "Commits answered without drafts: not_ready, out_of_kv, length, unknown_request.",
        ("reason",),
    ),
    MetricSpec(
        "outrider:dropped_proposals_total",
        "counter",
        "Proposals not used: stale (for another committed length) or unusable for verification.",
        ("reason",),
    ),
    MetricSpec(
        "outrider:degraded_requests_total",
        "counter",
        "Requests that lost speculation for some time, by the first cause: no_link, late, out_of_kv, length, unusable.",
        ("reason",),
    ),
    MetricSpec("outrider:picture_requests_total", "counter", "Requests whose prompt holds pictures."),
    MetricSpec("outrider:step_seconds", "histogram", "From the start of a decode step to the start of the next."),
    MetricSpec("outrider:step_target_seconds", "histogram", "Of it the target's forward pass and verification."),
    MetricSpec("outrider:step_draft_seconds", "histogram", "Of it the drafter's work that the target waited for."),
    MetricSpec("outrider:proposal_wait_seconds", "histogram", "Of it waiting for proposals."),
)

LENGTHS = (
    MetricSpec("outrider:chosen_lengths_total", "counter", "Rounds by the number of drafts wanted, 0 too.", ("k",)),
    MetricSpec("outrider:speculating", "gauge", "1 when drafting for the present requests is expected to be worth it."),
    MetricSpec("outrider:speculation_switches_total", "counter", "Speculation switched on or off for all requests."),
    MetricSpec("outrider:length_probes_total", "counter", "Rounds that tried a switched-off request again."),
    MetricSpec(
        "outrider:length_controller_failures_total",
        "counter",
        "Errors of the length controller; drafting ends with one.",
    ),
    MetricSpec(
        "outrider:expected_tokens_per_second",
        "gauge",
        "What the length controller expects of the chosen lengths (speculative) and of none (plain).",
        ("mode",),
    ),
)

LINK = (
    MetricSpec("outrider:link_state", "gauge", "1 for the link's present state, 0 for the others.", ("state",)),
    MetricSpec("outrider:link_backend", "gauge", "1 for the wire of the link that is up.", ("backend",)),
    MetricSpec("outrider:link_epoch", "gauge", "Number of the current link; every new one has a greater."),
    MetricSpec("outrider:link_reconnects_total", "counter", "Links made anew after the first."),
    MetricSpec("outrider:link_rtt_seconds", "gauge", "Median round trip of the pings when the link came up."),
    MetricSpec(
        "outrider:link_bytes_total", "counter", "Bytes over the current link, heartbeats included.", ("direction",)
    ),
    MetricSpec("outrider:link_frames_total", "counter", "Frames over the current link.", ("direction",)),
)

DRAFTER = (
    MetricSpec("outrider:drafter_up", "gauge", "1 when the replica's drafter actor answered this scrape."),
    MetricSpec("outrider:drafter_sequences", "gauge", "Sequences the drafter holds, for all targets linked to it."),
    MetricSpec("outrider:drafter_prefilling_sequences", "gauge", "Of these, waiting for their prefill."),
    MetricSpec("outrider:drafter_side_branches", "gauge", "Side branches drafted ahead and held now."),
    MetricSpec("outrider:drafter_branch_blocks", "gauge", "KV blocks that side branches have of their own."),
    MetricSpec("outrider:drafter_kv_cache_usage_ratio", "gauge", "Share of the drafter's KV blocks in use, 0 to 1."),
    MetricSpec("outrider:drafter_links", "gauge", "Targets linked to this drafter."),
    MetricSpec("outrider:drafter_steps_total", "counter", "Model steps of the drafter, prefill chunks included."),
    MetricSpec(
        "outrider:drafter_link_steps_total", "counter", "Of its model steps, what each target had of them.", ("target",)
    ),
    MetricSpec("outrider:drafter_answers_total", "counter", "Commits it answered with a proposal."),
    MetricSpec("outrider:drafter_draft_tokens_total", "counter", "Draft tokens it sent."),
    MetricSpec("outrider:drafter_step_seconds", "histogram", "Batched draft steps, without prefill.", ("method",)),
    MetricSpec("outrider:drafter_chosen_total", "counter", "Commits that each method's drafts answered.", ("method",)),
    MetricSpec(
        "outrider:drafter_judged_drafts_total", "counter", "Drafts the target judged, sent or not.", ("method",)
    ),
    MetricSpec("outrider:drafter_right_drafts_total", "counter", "Of these, those it would have taken.", ("method",)),
    MetricSpec("outrider:draft_vocabulary_tokens_total", "counter", "Committed tokens looked up in a cut vocabulary."),
    MetricSpec(
        "outrider:draft_vocabulary_misses_total", "counter", "Of these, not in it: they could not have been drafted."
    ),
)

SUFFIX = (
    MetricSpec("outrider:suffix_cached_requests", "gauge", "Requests whose answers a suffix drafter remembers."),
    MetricSpec("outrider:suffix_cached_tokens", "gauge", "Tokens of these answers."),
    MetricSpec("outrider:suffix_parts_learnt_total", "counter", "Parts of answers learnt, own and others'."),
    MetricSpec("outrider:suffix_parts_lost_total", "counter", "Parts dropped because too many waited."),
    MetricSpec("outrider:suffix_pool_failures_total", "counter", "Exchanges with the other drafters that failed."),
)
"""Of a suffix drafter."""

LEARNING = (
    MetricSpec("outrider:drafter_version", "gauge", "Version that drafts; 0 is the drafter as it was loaded."),
    MetricSpec("outrider:drafter_version_changes_total", "counter", "Versions that this drafter has taken."),
    MetricSpec(
        "outrider:drafter_refused_versions_total",
        "counter",
        "Versions that it could not load, not finite, or learned from another checkpoint.",
    ),
    MetricSpec("outrider:learning_failures_total", "counter", "Exchanges with the trainer that failed."),
    MetricSpec("outrider:learning_dropped_texts_total", "counter", "Texts that no trainer fetched in time."),
    MetricSpec("outrider:learning_tokens_total", "counter", "Tokens of answers that the trainer was given."),
    MetricSpec("outrider:learning_steps_total", "counter", "Training steps."),
    MetricSpec("outrider:learning_loss", "gauge", "Of the last training step."),
    MetricSpec("outrider:learning_adopted_total", "counter", "Versions that were better for certain, and serve."),
    MetricSpec("outrider:learning_withdrawn_total", "counter", "Versions that turned out worse, and no longer serve."),
    MetricSpec("outrider:learning_reverted_total", "counter", "Versions that somebody went back from."),
    MetricSpec(
        "outrider:learning_version_state",
        "gauge",
        "1 for what became of each of the last versions: serves, replaced, withdrawn, reverted.",
        ("version", "state"),
    ),
    MetricSpec(
        "outrider:learning_version_gain",
        "gauge",
        "Acceptance per token that let a version in, by texts; since: that had it withdrawn.",
        ("version", "texts"),
    ),
    MetricSpec(
        "outrider:learning_version_margin",
        "gauge",
        "How far such a gain may be off, one side, 95%.",
        ("version", "texts"),
    ),
    MetricSpec(
        "outrider:learning_refused_total",
        "counter",
        "Versions that the gate kept out: no_gain, forgets, not_finite, no_texts (too few held-out ones).",
        ("reason",),
    ),
    MetricSpec(
        "outrider:learning_gain",
        "gauge",
        "Acceptance per token that the last version offered had more than the one that serves, on held-out texts.",
        ("texts",),
    ),
    MetricSpec("outrider:learning_store_failures_total", "counter", "Versions that could not be kept on disk."),
)
"""Of a drafter that learns. From learning_tokens_total on they are the trainer's, who all drafters share."""

REPLICA = (
    MetricSpec("outrider:build_info", "gauge", "1; the versions are in the labels.", ("version", "vllm", "ray")),
    MetricSpec("outrider:snapshot_age_seconds", "gauge", "Age of the verifier's numbers in this scrape."),
)
"""Beside those above, of every replica."""

INGRESS = (
    MetricSpec(
        "outrider:requests_total", "counter", "Calls ended, by API (grpc, http) and status.", ("api", "method", "code")
    ),
    MetricSpec("outrider:requests_in_flight", "gauge", "Calls under way.", ("api",)),
    MetricSpec(
        "outrider:admission_rejections_total", "counter", "Requests refused before they reached an engine.", ("reason",)
    ),
)
"""Of the ingress that is scraped; no model_name, no replica."""

APPLICATION = (
    MetricSpec(
        "outrider:replica_up", "gauge", "1 when the replica answered this scrape, 0 while one is silent.", ("replica",)
    ),
    MetricSpec("outrider:replicas_silent", "gauge", "Running replicas that did not answer this scrape."),
)

CATALOG = {
    spec.name: spec
    for group in (ROUNDS, LENGTHS, LINK, DRAFTER, SUFFIX, LEARNING, REPLICA, INGRESS, APPLICATION)
    for spec in group
}


def series_names() -> frozenset[str]:
    """Every name that a query may use: a histogram's are its three series."""
    names: set[str] = set()
    for spec in CATALOG.values():
        if spec.kind == "histogram":
            names |= {f"{spec.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
        else:
            names.add(spec.name)
    return frozenset(names)
