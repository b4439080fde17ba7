"""From what a replica's rank 0 and drafter report to metric families. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.observability.exposition import Families

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
    "guesses_right": "outrider:drafter_guesses_right_total",
    "vocabulary_observed": "outrider:draft_vocabulary_tokens_total",
    "vocabulary_missed": "outrider:draft_vocabulary_misses_total",
}
_SUFFIX = {
    "suffix_cached_requests": "outrider:suffix_cached_requests",
    "suffix_cached_tokens": "outrider:suffix_cached_tokens",
    "suffix_parts_learnt": "outrider:suffix_parts_learnt_total",
    "suffix_parts_lost": "outrider:suffix_parts_lost_total",
    "suffix_pool_failures": "outrider:suffix_pool_failures_total",
}


def add_rounds(families: Families, rounds: Mapping[str, Any]) -> None:
    """rounds: Verifier.metrics()."""
    for name in ("rounds", "drafted_rounds", "late_rounds", "proposals", "proposal_bytes"):
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
    if "step_seconds" in drafter:
        families.add_histogram("outrider:drafter_step_seconds", drafter["step_seconds"])
