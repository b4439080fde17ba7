"""Chooses the defaults of a GPU where nothing is written. Pure.

The fields' own defaults are the CPU's. On a GPU a step takes milliseconds instead of tenths of a second, and hardly
longer for a hundred requests than for one, so batches, prefill chunks and deadlines are of another size. What a
configuration says is never overridden, not even where it says what the CPU's default is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.cluster.config import DraftModelConfig, OutriderConfig

_ON_GPU: dict[str, dict[str, tuple[Any, str]]] = {
    "target": {"max_num_seqs": (128, "a step of many requests takes hardly longer than of one")},
    "serving": {"max_ongoing_requests": (256, "a batch of target.max_num_seqs, and as many to follow")},
    "drafter": {
        "max_num_seqs": (128, "a step of many requests takes hardly longer than of one"),
        "prefill_chunk_tokens": (1024, "a chunk takes about as long as a few draft steps"),
        "draft_vocab_size": (0, "the whole output head: cutting it was measured on CPU only"),
    },
    "link": {
        "round_deadline_steps": (2.0, "waiting longer than two of the target's steps costs more than drafts give"),
        "round_deadline_ms": (250.0, "until the target's step has been measured, and never longer"),
        "link_deadline_ms": (1000.0, "a drafter's heartbeat is four times as frequent"),
    },
}
"""The value on a GPU, and why, by section and key."""

CPU_KV_CACHE_BYTES = 512 << 20
"""KV cache of an engine on CPU whose kv_cache_memory_bytes is not set. vLLM's CPU default is 92% of the machine, which
two engines on one machine cannot both have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One field's value that was chosen, by section and key, and why."""

    section: str
    key: str
    value: Any
    why: str


def choices(config: OutriderConfig) -> Iterator[Choice]:
    """Yields what is chosen for engines on a GPU."""
    link = config.link.model_fields_set
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
            if key == "round_deadline_steps" and "round_deadline_ms" in link:
                continue  # whoever wrote a deadline in milliseconds means it
            if key == "link_deadline_ms" and "round_deadline_ms" in link:
                value = max(value, 2 * config.link.round_deadline_ms)
            yield Choice(name, key, value, why)


def with_device_defaults(config: OutriderConfig, gpu: bool) -> OutriderConfig:
    """Returns the configuration with every choice made. On CPU it is the same."""
    sections: dict[str, dict[str, Any]] = {}
    for choice in choices(config) if gpu else ():
        if getattr(getattr(config, choice.section), choice.key) != choice.value:
            sections.setdefault(choice.section, {})[choice.key] = choice.value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed) if changed else config
