"""Names the engine arguments of vLLM that Outrider refuses, and the argument that an error of vLLM is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

Side = Literal["target", "drafter"]

_ROUNDS = "Outrider's worker, scheduler and executor take its place; leave it out"
_SAMPLER = "Outrider's sampler chooses every token and would ignore it; leave it out"

_OF_BOTH = {
    "worker_cls": _ROUNDS,
    "worker_extension_cls": _ROUNDS,
    "scheduler_cls": _ROUNDS,
    "scheduling_policy": _ROUNDS,
    "distributed_executor_backend": _ROUNDS,
    "additional_config": "it carries Outrider's settings to the ranks; leave it out",
    "disable_log_stats": "responses, routing and /metrics need these counts; leave it out",
    "data_parallel_size": "replicas are Outrider's; set serving.num_replicas",
    "speculative_config": "write the drafter and speculation sections",
    "logits_processors": _SAMPLER,
    "logprobs_mode": _SAMPLER,
    "served_model_name": "set serving.served_model_name",
    "otlp_traces_endpoint": "set serving.otlp_traces_endpoint",
    "structured_outputs_config": "set serving.structured_output and openai.reasoning_parser",
    "reasoning_parser": "set openai.reasoning_parser",
}

_TEXT_IDS = "a drafter reads and writes token ids of text, without a tokenizer; leave it out"
_ALL_SLOTS = "every adapter that may be loaded has a slot in the batch and in memory; set {} instead"

REFUSED: dict[Side, dict[str, str]] = {
    "target": {
        **_OF_BOTH,
        "max_cpu_loras": _ALL_SLOTS.format("target.engine_args.max_loras"),
        "reasoning_config": _SAMPLER,
        "per_request_spec_decode_metrics": "each response has these counts already; leave it out",
    },
    "drafter": {
        **_OF_BOTH,
        "async_scheduling": "the draft loop schedules each step; leave it out",
        "pipeline_parallel_size": "a drafter has tensor-parallel ranks only; set drafter.tensor_parallel_size",
        "decode_context_parallel_size": "the drafter's forward pass does not do it; leave it out",
        "kv_transfer_config": "the drafter allocates its KV blocks itself; leave it out",
        "enable_lora": "list the adapters in drafter.lora_modules",
        "language_model_only": _TEXT_IDS,
        "max_cpu_loras": _ALL_SLOTS.format("drafter.lora_modules"),
        "max_loras": _ALL_SLOTS.format("drafter.lora_modules"),
        "skip_tokenizer_init": _TEXT_IDS,
    },
}
"""Engine arguments that ``engine_args`` does not take, and what to do instead. All others reach vLLM as written."""

REFUSED_ON_CPU = {
    "enable_expert_parallel": "vLLM's CPU kernels read beyond a rank's experts and crash; leave it out on CPU",
}

FRONTEND_ARGS_ELSEWHERE: dict[str, str] = {
    "api_key": "serving.api_key",
    "allowed_origins": "serving.allowed_origins",
    "host": "serving.gateway.host",
    "port": "serving.gateway.http_port",
    "ssl_keyfile": "serving.gateway.tls.key",
    "ssl_certfile": "serving.gateway.tls.certificate",
    "ssl_ca_certs": "serving.gateway.tls.client_ca",
    "lora_modules": "target.lora_modules",
}
"""Maps arguments of vLLM's OpenAI server to the configuration key that takes their place."""


def about(error: str, given: Mapping[Side, Mapping[str, Any]]) -> str | None:
    """Returns the dotted path of the engine argument whose name or value occurs in an error message, else None.

    Args:
        given: The ``engine_args`` of each section.
    """
    for side, arguments in given.items():
        for name, value in arguments.items():
            words = [name.replace("_", "[_ -]"), *([re.escape(value)] if value and isinstance(value, str) else [])]
            if re.search(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)", error, re.IGNORECASE):
                return f"{side}.engine_args.{name}"
    return None
