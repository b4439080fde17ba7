"""vLLM's engine arguments in ``target.engine_args`` and ``drafter.engine_args``: what is passed on, and what is not.

Checked here without vLLM, against ``engine_args.json`` (see outrider.actors.vllm_seam.engine_args_schema), and once
more by vLLM's own types where the engine is made. What a section has a key of its own for, what Outrider decides itself
and what would have no effect, or a wrong one, is refused by name; all else reaches vLLM as it is written.
docs/engine-args.md is written from here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Side = Literal["target", "drafter"]

SCHEMA_PATH = Path(__file__).with_name("engine_args.json")


@dataclass(frozen=True, slots=True)
class Withheld:
    """Arguments that are not passed on, and why, with what to do instead."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    path: tuple[str, ...]
    """From the name of the argument on."""

    text: str
    found: Any
    """The value; an empty mapping where it is the name that is wrong."""


_PARALLEL_REPLICAS = (
    "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
    "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb", "data_parallel_backend", "dp_sync_interval",
    "disable_nccl_for_dp_synchronization", "prefill_schedule_interval", "enable_dbo", "ubatch_size",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "enable_elastic_ep", "elastic_ep_max_dp_size",
    "enable_fault_tolerance", "fault_tolerance_config", "aggregate_engine_logging",
)  # fmt: skip

_PLACES = (
    "distributed_executor_backend", "ray_workers_use_nsight", "master_addr", "master_port", "nnodes", "node_rank",
    "device_ids", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
)  # fmt: skip

_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")

ADAPTERS_PASSED_ON = (
    "fully_sharded_loras", "lora_dtype", "specialize_active_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""Of the target's, where it has adapters."""

MEDIA_PASSED_ON = (
    "disable_chunked_mm_input", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_tp_mode",
    "mm_processor_cache_gb", "mm_processor_kwargs",
)  # fmt: skip
"""Of the target's, where it takes pictures."""

_MEDIA_LIMITS = ("limit_mm_per_prompt", "allowed_media_domains")

_MEDIA = (
    "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs", "mm_processor_cache_type", "mm_hasher_algorithm",
    "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "mm_processor_device", "mm_ipc_gpu_memory_gb",
    "mm_device_do_normalize", "mm_encoder_only", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path",
    "mm_encoder_fp8_scale_save_margin", "video_pruning_rate", "video_pruning_method", "enable_mm_processor_stats",
    "enable_shm_tensor_arena", "ec_transfer_config", "ec_manager_config",
)  # fmt: skip

OWNED: dict[Side, tuple[Withheld, ...]] = {
    "target": (
        Withheld(
            ("worker_cls", "worker_extension_cls"),
            "the ranks' worker is Outrider's, it has the round built in; leave it out",
        ),
        Withheld(
            ("scheduler_cls", "scheduling_policy"),
            "the scheduler is Outrider's; set serving.max_overtaking_s for the order of requests",
        ),
        Withheld(
            ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
            "Outrider's scheduler sets a long prompt's share anew in each step; set target.max_num_batched_tokens",
        ),
        Withheld(
            _PLACES,
            "ranks are Ray actors where Outrider places them; set target.tensor_parallel_size and target.cores",
        ),
        Withheld(_PARALLEL_REPLICAS, "replicas are Outrider's; set serving.num_replicas"),
        Withheld(
            ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            "speculation is Outrider's; write the drafter and speculation sections",
        ),
        Withheld(
            ("per_request_spec_decode_metrics", "disable_log_stats"),
            "answers, routing and /metrics are made of these counts; leave it out",
        ),
        Withheld(("additional_config",), "it carries Outrider's own settings to the ranks; leave it out"),
        Withheld(_ADAPTERS, "adapters have a section of their own; write target.lora"),
        Withheld(_MEDIA_LIMITS, "pictures have a section of their own; write target.multimodal"),
        Withheld(("served_model_name",), "it has its key in another section; set serving.served_model_name"),
        Withheld(("otlp_traces_endpoint",), "it has its key in another section; set serving.otlp_traces_endpoint"),
        Withheld(
            ("structured_outputs_config",),
            "requests are checked against Outrider's own settings; set serving.structured_output",
        ),
        Withheld(("reasoning_parser",), "it has its key in another section; set openai.reasoning_parser"),
        Withheld(
            ("max_num_queued_reqs", "max_num_queued_tokens"),
            "the queue is Outrider's; set serving.max_queued_requests",
        ),
        Withheld(("shutdown_timeout",), "a server ends in Outrider's own order; set serving.drain_s"),
        Withheld(
            ("logging_config", "log_level", "log_config_file"),
            "every process logs in one form; set serving.log_format, and VLLM_LOGGING_LEVEL in the environment",
        ),
    ),
}  # fmt: skip
"""Decided by Outrider, or by a key elsewhere in the configuration."""

REFUSED: dict[Side, tuple[Withheld, ...]] = {
    "target": (
        Withheld(
            ("prefill_context_parallel_size",),
            "a model is split over ranks by its layers and their widths alone; set target.tensor_parallel_size",
        ),
        Withheld(
            ("default_mm_loras", "enable_tower_connector_lora"),
            "a request names its adapter, whatever else it holds; leave it out",
        ),
        Withheld(("lora_target_modules",), "it would drop parts of an adapter without a word; leave it out"),
        Withheld(("max_lora_cls_labels",), "Outrider serves models that generate text token by token; leave it out"),
        Withheld(
            ("allowed_local_media_path",),
            "a request could name any file beneath it, and be told what a picture of it shows; leave it out",
        ),
        Withheld(_MEDIA, "requests are text and pictures, which are taken in one way; leave it out"),
        Withheld(
            ("runner", "convert", "pooler_config", "io_processor_plugin", "diffusion_config"),
            "Outrider serves models that generate text token by token, and nothing else; leave it out",
        ),
        Withheld(
            ("skip_tokenizer_init", "tokens_only", "enable_prompt_embeds"),
            "text and token ids come in, and text goes out; leave it out",
        ),
        Withheld(
            (
                "logits_processors", "logprobs_mode", "use_fp64_gumbel", "enable_batch_sharded_sampling",
                "watermark_config", "reasoning_config",
            ),
            "every token is chosen by Outrider's sampler, which has none of it; leave it out",
        ),
        Withheld(("max_logprobs",), "one limit, 20, holds for gRPC and OpenAI alike; leave it out"),
        Withheld(("stream_interval",), "a message a round is what the answers' metrics count; leave it out"),
        Withheld(
            ("enable_return_routed_experts", "return_sampling_mask", "aux_output_config", "enable_trace_replay"),
            "no request asks for it, and no answer carries it; leave it out",
        ),
        Withheld(
            (
                "enable_sleep_mode", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
                "enable_nccl_comm_suspend", "weight_transfer_config", "profiler_config",
            ),
            "Outrider has no call that would use it; leave it out",
        ),
        Withheld(
            ("kv_events_config",),
            "it sends every prompt's token ids to whoever connects to its port, without a key; leave it out",
        ),
        Withheld(
            ("hf_token",),
            "a secret does not belong into a configuration that is shown and copied; set HF_TOKEN in the environment",
        ),
        Withheld(("reasoning_parser_plugin",), "openai.reasoning_parser takes vLLM's own parsers; leave it out"),
        Withheld(
            ("enable_log_requests", "disable_cascade_attn", "max_parallel_loading_workers"),
            "it has no effect here; leave it out",
        ),
        Withheld(
            ("model_weights", "_api_process_count", "_api_process_rank"),
            "vLLM's own note, which it writes itself; leave it out",
        ),
    ),
}  # fmt: skip
"""Of no effect here, or of one that breaks what Outrider promises."""

_DRAFTERS_OWN = (
    Withheld(
        ("language_model_only", "skip_mm_profiling", *_MEDIA_LIMITS, *MEDIA_PASSED_ON),
        "drafts are text, and a draft model is loaded for text alone; leave it out",
    ),
    Withheld(
        (
            "enable_chunked_prefill", "max_num_scheduled_tokens", "max_num_active_seqs", "scheduler_reserve_full_isl",
            "watermark",
        ),
        "the drafter plans its steps itself; set drafter.prefill_chunk_tokens and drafter.max_draft_rows",
    ),
)  # fmt: skip

_DRAFTERS_REFUSED = (
    Withheld(
        ADAPTERS_PASSED_ON,
        "a draft model's adapters run as vLLM runs them by default; leave it out",
    ),
    Withheld(
        ("pipeline_parallel_size",),
        "a drafter is split over tensor-parallel ranks only; set drafter.tensor_parallel_size",
    ),
    Withheld(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "renderer_num_workers"),
        "a drafter reads and writes token ids, the target's; leave it out",
    ),
    Withheld(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "kv_sharing_fast_prefill"),
        "the drafter hands out its KV blocks itself, and keeps them where they are; leave it out",
    ),
    Withheld(
        (
            "decode_context_parallel_size", "dcp_comm_backend", "dcp_q_replicate", "dcp_kv_cache_interleave_size",
            "cp_kv_cache_interleave_size", "enable_eplb", "eplb_config",
        ),
        "the drafter's forward pass is its own and does not do it; leave it out",
    ),
    Withheld(
        (
            "mamba_config", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "mamba_cache_mode",
            "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm", "mamba_backend",
            "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds",
            "gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend",
        ),
        "a draft model has attention layers only, whose state can be rolled back; leave it out",
    ),
    Withheld(
        (
            "show_hidden_metrics_for_version", "collect_detailed_traces", "kv_cache_metrics", "kv_cache_metrics_sample",
            "custom_histogram_buckets", "cudagraph_metrics", "enable_mfu_metrics", "enable_logging_iteration_details",
        ),
        "of a drafter Outrider measures what it needs itself; leave it out",
    ),
)  # fmt: skip

OWNED["drafter"] = (*(each for each in OWNED["target"] if each.names != _MEDIA_LIMITS), *_DRAFTERS_OWN)
REFUSED["drafter"] = (*REFUSED["target"], *_DRAFTERS_REFUSED)

RUN_HERE: dict[Side, frozenset[str]] = {
    "target": frozenset(
        {
            "block_size", "enable_chunked_prefill", "hf_overrides", "kv_cache_dtype", "load_format",
            "prefix_caching_hash_algo",
        }
    ),
    "drafter": frozenset({"load_format", "num_gpu_blocks_override"}),
}  # fmt: skip
"""What engines under test run with. No test of Outrider's has run an engine with any other that is passed on."""


NOT_ON_CPU: dict[str, str] = {
    "enable_expert_parallel": (
        "vLLM's CPU kernels do not ask which experts a rank holds, and read beyond them: a segmentation fault with the "
        "first request; leave it out on CPU"
    ),
}
"""Passed on where there are GPUs. Argument -> what becomes of an engine on CPU, which vLLM starts with it."""


@cache
def schema() -> dict[str, Any]:
    """JSON Schema of all of vLLM's engine arguments."""
    document: dict[str, Any] = json.loads(SCHEMA_PATH.read_text())
    return document


def reason_against(side: Side, name: str) -> str | None:
    """Why an argument that the section has no key of its own for is not passed on. None: it is."""
    for tables in (OWNED, REFUSED):
        for withheld in tables[side]:
            if name in withheld.names:
                return withheld.reason.replace("target.", f"{side}.")
    return None


def problems(side: Side, arguments: Mapping[str, Any], own_keys: Collection[str]) -> list[Problem]:
    """What is wrong with a section's ``engine_args``. own_keys: of the section, beside engine_args."""
    found = (_problem(side, name, value, own_keys) for name, value in arguments.items())
    return [problem for problem in found if problem is not None]


def _problem(side: Side, name: str, value: Any, own_keys: Collection[str]) -> Problem | None:
    known = schema()["properties"]
    if name not in known:
        return Problem((name,), _unknown(name, known, "an engine argument of vLLM's"), {})
    if name in own_keys:
        return Problem((name,), f"has a key of its own; write it as {side}.{name}", {})
    if (reason := reason_against(side, name)) is not None:
        return Problem((name,), f"is not passed on to vLLM: {reason}", {})
    return _wrong_value(name, value)


def about(error: str, given: Mapping[Side, Mapping[str, Any]]) -> str | None:
    """Dotted path of the argument that an engine's error is about: its name, or its value, stands in the error's words.
    None: none of them does. given: each section's ``engine_args``."""
    for side, arguments in given.items():
        for name, value in arguments.items():
            words = [name.replace("_", "[_ -]"), *([re.escape(value)] if value and isinstance(value, str) else [])]
            if re.search(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", error, re.IGNORECASE):
                return f"{side}.engine_args.{name}"
    return None


def _wrong_value(name: str, value: Any) -> Problem | None:
    # Imported here: whoever writes no engine_args needs none of it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    defined = schema()["$defs"]
    of_field = {**schema()["properties"][name], "$defs": defined}
    error = best_match(Draft202012Validator(of_field).iter_errors(value))
    if error is None:
        return None
    of_keys = error.validator in ("additionalProperties", "required")
    while not of_keys and error.parent is not None and len(error.parent.absolute_path) == len(error.absolute_path):
        error = error.parent  # everything that would have been right, not one form of it
    path = (name, *map(str, error.absolute_path))
    if error.validator == "additionalProperties":
        allowed = error.schema["properties"]
        unknown = str(next(key for key in error.instance if key not in allowed))
        return Problem((*path, unknown), _unknown(unknown, allowed, f"a key of {'.'.join(path)}"), {})
    if error.validator == "required":
        missing = next(key for key in error.schema["required"] if key not in error.instance)
        return Problem((*path, missing), "required, but missing", {})
    return Problem(path, f"must be {_in_words(error.schema)}", error.instance)


_IN_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}


def _in_words(kind: Mapping[str, Any]) -> str:
    """What a schema, without its references, asks for."""
    if (name := kind.get("$ref")) is not None:
        return _in_words(schema()["$defs"][name.rpartition("/")[2]])
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(_in_words(each) for each in kind["anyOf"]))
    if "enum" in kind:
        return f"one of {', '.join(map(str, kind['enum']))}"
    words = _IN_WORDS.get(kind.get("type", ""), "another value")
    if kind.get("items"):
        words += f", each {_in_words(kind['items'])}"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{text} {kind[key]:g}" for key, text in bounds.items() if key in kind]
    return " ".join([words, *limits])


def _unknown(name: str, known: Collection[str], what: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"is not {what}{f'; did you mean {close[0]}?' if close else '; remove it or check its spelling'}"
