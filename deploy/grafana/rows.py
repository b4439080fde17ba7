"""What the dashboard shows: rows of panels, each with its queries in PromQL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One time series panel. queries: (expression, legend). ``$of`` stands for the label filter of a replica's
    metrics, ``$rate`` for the interval of rates."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    description: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """p50, p90, p99 over the chosen replicas."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{{$of}}[$rate])))", f"p{q * 100:g}")
        for q in (0.5, 0.9, 0.99)
    )


def mean(histogram: str) -> str:
    return f"sum(rate({histogram}_sum{{$of}}[$rate])) / sum(rate({histogram}_count{{$of}}[$rate]))"


def ratio(above: str, below: str) -> str:
    """Of two counters, by replica."""
    return f"sum by (replica) (rate({above}[$rate])) / sum by (replica) (rate({below}[$rate]))"


TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Output tokens",
            (("sum by (replica) (rate(vllm:generation_tokens_total{$of}[$rate]))", "{{replica}}"),),
            "short",
            "Tokens a second, by replica.",
            stacked=True,
        ),
        Panel(
            "Requests by status",
            (("sum by (api, code) (rate(outrider:requests_total[$rate]))", "{{api}} {{code}}"),),
            "reqps",
            "Calls that ended, as the ingress counts them; all models and replicas.",
        ),
        Panel(
            "Requests under way",
            (
                ("sum by (replica) (vllm:num_requests_running{$of})", "running {{replica}}"),
                ("sum(outrider:requests_in_flight)", "at the ingress"),
            ),
        ),
        Panel(
            "Requests with pictures",
            (("sum by (replica) (rate(outrider:picture_requests_total{$of}[$rate]))", "{{replica}}"),),
            "reqps",
            "Begun, by replica. Nothing without target.multimodal.",
        ),
        Panel(
            "Replicas",
            (
                ('sum(outrider:replica_up{replica=~"$replica"})', "up"),
                ("max(outrider:replicas_silent)", "silent"),
                ("max by (deployment) (outrider:replicas_waiting)", "no node has room: {{deployment}}"),
            ),
        ),
        Panel(
            "Waiting for a node",
            (("max by (deployment) (outrider:replicas_waiting_seconds)", "{{deployment}}"),),
            "s",
            "How long the replica has that has waited longest for a node with room.",
        ),
        Panel(
            "Autoscaling",
            (
                ("max by (state) (outrider:autoscaling_replicas)", "{{state}}"),
                ("max by (reason) (outrider:autoscaling_reason) == 1", "because: {{reason}}"),
            ),
            "short",
            "Target replicas wanted and running, and why. Nothing without serving.autoscaling.",
        ),
        Panel(
            "Prompt tokens",
            (
                ("sum(rate(vllm:prompt_tokens_total{$of}[$rate]))", "prompt"),
                ("sum(rate(vllm:prompt_tokens_cached_total{$of}[$rate]))", "of these from the prefix cache"),
            ),
            "short",
            "Tokens a second.",
        ),
        Panel(
            "Ended answers",
            (
                (
                    "sum by (finished_reason) (rate(vllm:request_success_total{$of}[$rate]))",
                    "{{finished_reason}}",
                ),
            ),
            "reqps",
        ),
    ),
)

KEYS = Row(
    "Keys",
    (
        Panel("Calls by key", (("sum by (key) (rate(outrider:key_requests_total[$rate]))", "{{key}}"),), "reqps"),
        Panel("Tokens by key", (("sum by (key, kind) (rate(outrider:key_tokens_total[$rate]))", "{{key}} {{kind}}"),)),
        Panel(
            "Refused for their key",
            (("sum by (key, reason) (rate(outrider:key_refusals_total[$rate]))", "{{key}} {{reason}}"),),
            "reqps",
            "By the ingress; proxies count theirs in Ray's metrics.",
        ),
        Panel(
            "File of keys",
            (
                ("max(outrider:keys_stale)", "stale"),
                ("sum(increase(outrider:keys_reload_failures_total[$rate]))", "changes that cannot be used"),
            ),
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel("Time to first token", quantiles("vllm:time_to_first_token_seconds"), "s"),
        Panel("Inter-token latency", quantiles("vllm:inter_token_latency_seconds"), "s"),
        Panel("Whole request", quantiles("vllm:e2e_request_latency_seconds"), "s"),
    ),
)

TARGET_LOAD = Row(
    "KV cache and queue of the target",
    (
        Panel("KV cache", (("max by (replica) (vllm:kv_cache_usage_perc{$of})", "{{replica}}"),), "percentunit"),
        Panel(
            "Waiting requests",
            (("sum by (replica) (vllm:num_requests_waiting{$of})", "{{replica}}"),),
        ),
        Panel("Time in the queue", quantiles("vllm:request_queue_time_seconds"), "s"),
        Panel(
            "Refused at the door",
            (
                ("sum by (reason) (rate(outrider:admission_rejections_total[$rate]))", "{{reason}}"),
                ("sum by (by) (rate(outrider:refused_generations_total[$rate]))", "no room, by {{by}}"),
            ),
            "reqps",
        ),
        Panel(
            "Preemptions",
            (("sum by (replica) (rate(vllm:num_preemptions_total{$of}[$rate]))", "{{replica}}"),),
        ),
        Panel(
            "Prefix cache hits",
            ((ratio("vllm:prefix_cache_hits_total{$of}", "vllm:prefix_cache_queries_total{$of}"), "{{replica}}"),),
            "percentunit",
            "Share of the prompts' tokens.",
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        Panel(
            "Acceptance length",
            (
                (
                    "1 + "
                    + ratio(
                        "vllm:spec_decode_num_accepted_tokens_total{$of}", "vllm:spec_decode_num_drafts_total{$of}"
                    ),
                    "{{replica}}",
                ),
            ),
            "short",
            "Tokens a drafted round commits, the target's own included.",
        ),
        Panel(
            "Acceptance by position",
            (
                (
                    "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{$of}[$rate])) "
                    "/ on () group_left () sum(rate(vllm:spec_decode_num_drafts_total{$of}[$rate]))",
                    "position {{position}}",
                ),
            ),
            "percentunit",
            "Share of drafted rounds in which the draft at this position was accepted, those before it included.",
        ),
        Panel(
            "Acceptance rate",
            (
                (
                    ratio(
                        "vllm:spec_decode_num_accepted_tokens_total{$of}",
                        "vllm:spec_decode_num_draft_tokens_total{$of}",
                    ),
                    "{{replica}}",
                ),
            ),
            "percentunit",
            "Accepted drafts of those verified.",
        ),
        Panel(
            "Hit rate",
            (
                (
                    "sum by (origin) (rate(outrider:proposal_origins_total{$of}[$rate])) "
                    "/ on () group_left () sum(rate(outrider:proposal_origins_total{$of}[$rate]))",
                    "{{origin}}",
                ),
            ),
            "percentunit",
            "Answers to commits: drafted ahead on the main line or on a side branch, or a miss.",
            stacked=True,
        ),
        Panel(
            "Foreseen",
            (
                (ratio("outrider:foreseen_total{$of}", "outrider:drafted_rounds_total{$of}"), "rounds, {{replica}}"),
                (ratio("outrider:foreseen_total{$of}", "outrider:proposals_total{$of}"), "proposals, {{replica}}"),
            ),
            "percentunit",
            "Rounds whose drafts had arrived before the outcome was known, so that the drafter was not asked; and what "
            "share of all that is sent they are.",
        ),
        Panel(
            "Chosen k",
            (("sum by (k) (rate(outrider:chosen_lengths_total{$of}[$rate]))", "k = {{k}}"),),
            "short",
            "Rounds a second by the number of drafts wanted.",
            stacked=True,
        ),
        Panel(
            "Length controller",
            (
                ("min by (replica) (outrider:speculating{$of})", "speculating {{replica}}"),
                (
                    "sum by (replica) (rate(outrider:speculation_switches_total{$of}[$rate]))",
                    "switches a second {{replica}}",
                ),
                (
                    "sum by (replica) (outrider:length_controller_failures_total{$of})",
                    "failures {{replica}}",
                ),
            ),
        ),
    ),
)

ROUNDS = Row(
    "Rounds",
    (
        Panel("Proposal wait", quantiles("outrider:proposal_wait_seconds"), "s", "Of each decode step."),
        Panel(
            "Where a round's time goes",
            (
                (mean("outrider:step_target_seconds"), "target"),
                (mean("outrider:step_draft_seconds"), "draft that was waited for"),
                (mean("outrider:step_seconds"), "whole step"),
            ),
            "s",
            "Means of decode steps; what is left of the whole is scheduling, messages and waiting.",
        ),
        Panel(
            "Lost speculation",
            (
                (
                    ratio("outrider:late_rounds_total{$of}", "outrider:rounds_total{$of}"),
                    "late rounds {{replica}}",
                ),
            ),
            "percentunit",
            "Share of rounds that decoded plainly because their proposals came too late.",
        ),
        Panel(
            "Degraded requests",
            (("sum by (reason) (rate(outrider:degraded_requests_total{$of}[$rate]))", "{{reason}}"),),
            "reqps",
            "Requests that lost speculation for some time, by the first cause.",
        ),
        Panel(
            "Proposals not used",
            (
                ("sum by (reason) (rate(outrider:refused_proposals_total{$of}[$rate]))", "refused: {{reason}}"),
                ("sum by (reason) (rate(outrider:dropped_proposals_total{$of}[$rate]))", "dropped: {{reason}}"),
            ),
        ),
        Panel(
            "Bytes a round",
            (
                (
                    ratio("outrider:proposal_bytes_total{$of}", "outrider:drafted_rounds_total{$of}"),
                    "{{replica}}",
                ),
            ),
            "bytes",
            "Of the frames that carry proposals.",
        ),
    ),
)

LINK = Row(
    "Link",
    (
        Panel(
            "State",
            (
                ('max by (replica) (outrider:link_state{$of, state="up"})', "up {{replica}}"),
                ("max by (replica, backend) (outrider:link_backend{$of})", "over {{backend}} {{replica}}"),
            ),
            "bool_on_off",
        ),
        Panel(
            "Epoch and reconnects",
            (
                ("max by (replica) (outrider:link_epoch{$of})", "epoch {{replica}}"),
                ("sum by (replica) (outrider:link_reconnects_total{$of})", "reconnects {{replica}}"),
            ),
        ),
        Panel("Round trip at start-up", (("max by (replica) (outrider:link_rtt_seconds{$of})", "{{replica}}"),), "s"),
        Panel(
            "Traffic",
            (("sum by (direction) (rate(outrider:link_bytes_total{$of}[$rate]))", "{{direction}}"),),
            "Bps",
        ),
    ),
)

DRAFTER = Row(
    "Drafter",
    (
        Panel("Up", (("min by (replica) (outrider:drafter_up{$of})", "{{replica}}"),), "bool_on_off"),
        Panel("Draft step", quantiles("outrider:drafter_step_seconds"), "s", "Batched draft steps, no prefill."),
        Panel(
            "Sequences",
            (
                ("sum by (replica) (outrider:drafter_sequences{$of})", "held {{replica}}"),
                ("sum by (replica) (outrider:drafter_prefilling_sequences{$of})", "prefilling {{replica}}"),
                ("sum by (replica) (outrider:drafter_side_branches{$of})", "side branches {{replica}}"),
            ),
        ),
        Panel(
            "KV cache",
            (("max by (replica) (outrider:drafter_kv_cache_usage_ratio{$of})", "{{replica}}"),),
            "percentunit",
        ),
        Panel(
            "Draft vocabulary misses",
            (
                (
                    ratio("outrider:draft_vocabulary_misses_total{$of}", "outrider:draft_vocabulary_tokens_total{$of}"),
                    "{{replica}}",
                ),
            ),
            "percentunit",
            "Committed tokens that the cut output head could not have drafted.",
        ),
        Panel(
            "Steps, by the target they were for",
            (("sum by (replica, target) (rate(outrider:drafter_link_steps_total{$of}[$rate]))", "{{target}}"),),
            "short",
            "What each target linked to a drafter has of its steps.",
            stacked=True,
        ),
        Panel(
            "Drafters beside each other",
            (("sum by (method) (rate(outrider:drafter_chosen_total{$of}[$rate]))", "{{method}}"),),
            "short",
            "Commits a second, by the method whose drafts answered them (drafter.beside).",
            stacked=True,
        ),
        Panel(
            "Drafts that are right, by method",
            (
                (
                    "sum by (method) (rate(outrider:drafter_right_drafts_total{$of}[$rate])) / "
                    "sum by (method) (rate(outrider:drafter_judged_drafts_total{$of}[$rate]))",
                    "{{method}}",
                ),
            ),
            "percentunit",
            "Of those that the target judged, sent or not.",
        ),
        Panel(
            "What a suffix drafter remembers",
            (
                ("max by (replica) (outrider:suffix_cached_requests{$of})", "answers, {{replica}}"),
                ("max by (replica) (outrider:suffix_cached_tokens{$of})", "tokens, {{replica}}"),
            ),
        ),
        Panel(
            "Learning among suffix drafters",
            (
                ("sum by (replica) (rate(outrider:suffix_parts_learnt_total{$of}[$rate]))", "learnt, {{replica}}"),
                ("sum by (replica) (rate(outrider:suffix_parts_lost_total{$of}[$rate]))", "lost, {{replica}}"),
                (
                    "sum by (replica) (rate(outrider:suffix_pool_failures_total{$of}[$rate]))",
                    "failed exchanges, {{replica}}",
                ),
            ),
        ),
        Panel(
            "Version that drafts, and what the last one would gain",
            (
                ("max by (replica) (outrider:drafter_version{$of})", "version, {{replica}}"),
                ("100 * max by (texts) (outrider:learning_gain{$of})", "points of acceptance, {{texts}} texts"),
            ),
        ),
        Panel(
            "Learning: versions and failures",
            (
                ("max(outrider:learning_adopted_total{$of})", "adopted"),
                ("max(outrider:learning_withdrawn_total{$of})", "withdrawn"),
                ("max(outrider:learning_reverted_total{$of})", "gone back from"),
                ("max by (reason) (outrider:learning_refused_total{$of})", "refused, {{reason}}"),
                ("sum by (replica) (outrider:learning_failures_total{$of})", "failed exchanges, {{replica}}"),
            ),
        ),
    ),
)

ROWS = (TRAFFIC, LATENCY, SPECULATION, ROUNDS, LINK, DRAFTER, TARGET_LOAD, KEYS)
