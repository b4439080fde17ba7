"""Defaults that depend on the device: what nobody wrote is chosen when a deployment is built. Pure.

The fields' own defaults are the CPU's. On a GPU a step takes milliseconds instead of tenths of a second, and hardly
longer for a hundred requests than for one, so batches, prefill chunks and deadlines are of another size. What a
configuration says is never overridden, not even where it says what the CPU's default is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outrider.cluster.config import DraftModelConfig, LinkConfig, OutriderConfig
from outrider.cluster.config_section import Section

_ON_GPU: dict[str, tuple[Any, str, str]] = {
    "max_num_seqs": (
        128,
        "a step of many requests takes hardly longer than of one",
        "a step takes the longer the more requests it has",
    ),
    "max_ongoing_requests": (
        256,
        "a batch of target.max_num_seqs, and as many to follow",
        "four batches of target.max_num_seqs",
    ),
    "prefill_chunk_tokens": (
        1024,
        "a chunk takes about as long as a few draft steps",
        "a longer chunk delays proposals",
    ),
    "draft_vocab_size": (
        0,
        "the whole output head: cutting it was measured on CPU only",
        "what it was trained on, else 32768 of a vocabulary twice as large: the head is a large part of a step",
    ),
    "round_deadline_steps": (
        2.0,
        "waiting longer than two of the target's steps, as measured while it runs, costs more than drafts give",
        "link.round_deadline_ms alone",
    ),
    "round_deadline_ms": (
        250.0,
        "until the target's step has been measured, and never longer",
        "a draft step takes tens of milliseconds on a core, and a prefill chunk may come first",
    ),
    "link_deadline_ms": (
        1000.0,
        "a drafter beats its heart four times as often; plain decoding meanwhile costs every request",
        "a process that has to share its core may be silent for seconds",
    ),
}
"""By key: the value on a GPU, why, and why the CPU's is what it is."""

CPU_KV_CACHE_BYTES = 512 << 20
"""Where kv_cache_memory_bytes is not set. vLLM's CPU default is 92% of the machine, which two engines on one machine
cannot both have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One field's value. written: the configuration says so, nothing was chosen."""

    field: str
    """Dotted path."""

    value: Any
    why: str
    written: bool = False


def choices(config: OutriderConfig, gpu: bool) -> list[Choice]:
    """Of every field whose default depends on the device. gpu: whether the engines run on one."""
    found = [
        _choice("target", config.target, "max_num_seqs", gpu),
        _choice("serving", config.serving, "max_ongoing_requests", gpu),
    ]
    if isinstance(config.drafter, DraftModelConfig):
        keys = ("max_num_seqs", "prefill_chunk_tokens", "draft_vocab_size")
        found += [_choice("drafter", config.drafter, key, gpu) for key in keys]
    if config.remote_drafter is not None:
        found += _deadlines(config.link, gpu)
    return found


def with_device_defaults(config: OutriderConfig, gpu: bool) -> OutriderConfig:
    """The configuration with every choice made. On CPU it is the same."""
    sections: dict[str, dict[str, Any]] = {}
    for choice in choices(config, gpu):
        name, _, key = choice.field.rpartition(".")
        if not choice.written and getattr(getattr(config, name), key) != choice.value:
            sections.setdefault(name, {})[key] = choice.value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed) if changed else config


def _deadlines(link: LinkConfig, gpu: bool) -> list[Choice]:
    keys = ("round_deadline_steps", "round_deadline_ms", "link_deadline_ms")
    steps, round_ms, link_ms = (_choice("link", link, key, gpu) for key in keys)
    if gpu and round_ms.written and not steps.written:  # whoever wrote a deadline in milliseconds means it
        steps = replace(steps, value=None, why="GPU: link.round_deadline_ms is written")
    if gpu and not link_ms.written:  # never at or below a round's deadline that is written
        link_ms = replace(link_ms, value=max(link_ms.value, 2 * float(round_ms.value)))
    return [steps, round_ms, link_ms]


def _choice(name: str, section: Section, key: str, gpu: bool) -> Choice:
    """name: of the section."""
    field, value = f"{name}.{key}", getattr(section, key)
    if key in section.model_fields_set:
        return Choice(field, value, "as the configuration says", written=True)
    on_gpu, why_on_gpu, why_on_cpu = _ON_GPU[key]
    budget = getattr(section, "max_num_batched_tokens", None)
    if key == "max_num_seqs" and budget is not None and budget < on_gpu:  # which vLLM refuses
        on_gpu, why_on_gpu = budget, "a step has no more requests than max_num_batched_tokens"
    return Choice(field, on_gpu, f"GPU: {why_on_gpu}") if gpu else Choice(field, value, f"CPU: {why_on_cpu}")
