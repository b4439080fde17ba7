"""The rows about speculation: what it yields, its rounds, and the link and the drafter behind them."""

from __future__ import annotations

from deploy.grafana.panel import Panel, Row, mean, quantiles, ratio

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
            (('max by (replica) (outrider:link_state{$of, state="up"})', "up {{replica}}"),),
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
            "Guesses from the text that were right",
            (("sum by (replica) (rate(outrider:drafter_guesses_right_total{$of}[$rate]))", "{{replica}}"),),
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
    ),
)
