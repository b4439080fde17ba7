"""Chooses the defaults of a GPU for keys that the configuration leaves out. Pure.

The fields' own defaults are the CPU's. A value that the configuration sets is never changed, even where it equals the
CPU's default. A key is listed here only with a reason that can be checked; every other key has one default for all
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.cluster.config import DraftModelConfig, OutriderConfig

_VLLM_S_BATCH = (128, "vLLM's SchedulerConfig.DEFAULT_MAX_NUM_SEQS; a step on a GPU reads its weights once for all")
_ON_GPU: dict[str, dict[str, tuple[Any, str]]] = {
    "target": {"max_num_seqs": _VLLM_S_BATCH},
    "serving": {"max_ongoing_requests": (256, "target.max_num_seqs twice: a full batch, and the next one waiting")},
    "drafter": {
        "max_num_seqs": _VLLM_S_BATCH,
        "prefill_chunk_tokens": (
            1024,
            "3.5 draft steps: by its data sheet an H100 computes 295 tokens in the time in which it reads the weights "
            "(989 Tflop/s in bfloat16 over 3.35 TB/s)",
        ),
        "draft_vocab_size": (0, "the whole output head, as in vLLM: a smaller one was faster on CPU (1.08 times)"),
    },
    "link": {
        "round_deadline_steps": (2.0, "plain decoding brings two tokens meanwhile, which most proposals do not exceed"),
    },
}
"""The value on a GPU and its reason, by section and key."""

CPU_KV_CACHE_BYTES = 512 << 20
"""KV cache of an engine on CPU without kv_cache_memory_bytes. vLLM's CPU default is 92% of the machine's memory, which
target and drafter on one machine cannot both have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds the chosen value of one field, and why it was chosen."""

    section: str
    key: str
    value: Any
    why: str


def choices(config: OutriderConfig) -> Iterator[Choice]:
    """Yields the values chosen for engines on a GPU."""
    for name, keys in _ON_GPU.items():
        section = getattr(config, name)
        if name == "drafter" and not isinstance(section, DraftModelConfig):
            continue
        if name == "link" and config.remote_drafter is None:
            continue
        for key, (value, why) in keys.items():
            if key in section.model_fields_set:
                continue
            if key == "max_num_seqs" and section.max_num_batched_tokens is not None:
                value = min(value, section.max_num_batched_tokens)  # vLLM refuses fewer tokens than requests
            if key == "round_deadline_steps" and "round_deadline_ms" in section.model_fields_set:
                continue  # a deadline in milliseconds stays the only one
            yield Choice(name, key, value, why)


def with_device_defaults(config: OutriderConfig, gpu: bool) -> OutriderConfig:
    """Returns the configuration with the defaults of its device. On CPU it is unchanged."""
    sections: dict[str, dict[str, Any]] = {}
    for choice in choices(config) if gpu else ():
        if getattr(getattr(config, choice.section), choice.key) != choice.value:
            sections.setdefault(choice.section, {})[choice.key] = choice.value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed) if changed else config
