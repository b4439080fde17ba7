"""The rows that any server would show: its traffic, its latency, and what its engine holds."""

from __future__ import annotations

from deploy.grafana.panel import Panel, Row, quantiles, ratio

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
            "Replicas",
            (
                ('sum(outrider:replica_up{replica=~"$replica"})', "up"),
                ("max(outrider:replicas_silent)", "silent"),
            ),
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
            (("sum by (reason) (rate(outrider:admission_rejections_total[$rate]))", "{{reason}}"),),
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
