"""Defaults that depend on the device: what nobody wrote is chosen when a deployment is built. Pure.

The fields' own defaults are the CPU's. On a GPU a step takes milliseconds instead of tenths of a second, and hardly
longer for a hundred requests than for one, so batches, prefill chunks and deadlines are of another size. What a
configuration says is never overridden, not even where it says what the CPU's default is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.cluster.config import DraftModelConfig, OutriderConfig
from outrider.cluster.config_section import Section
from outrider.cluster.drafter_config import DraftEngineConfig

GPU_MAX_NUM_SEQS = 128
GPU_MAX_ONGOING_REQUESTS = 256
GPU_PREFILL_CHUNK_TOKENS = 1024
GPU_ROUND_DEADLINE_STEPS = 2.0
GPU_ROUND_DEADLINE_MS = 250.0
GPU_LINK_DEADLINE_MS = 1000.0

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
    found = [_batch(config.target, "target.max_num_seqs", gpu)]
    found.append(
        _choice(
            config.serving,
            "serving.max_ongoing_requests",
            GPU_MAX_ONGOING_REQUESTS,
            gpu,
            "a batch of target.max_num_seqs, and as many to follow",
            "four batches of target.max_num_seqs",
        )
    )
    if isinstance(config.drafter, DraftModelConfig):
        for section, engine in config.drafter.models.items():
            found += _of_draft_model(section, engine, gpu)
    if config.remote_drafter is not None:
        found += _deadlines(config, gpu)
    return found


def with_device_defaults(config: OutriderConfig, gpu: bool) -> OutriderConfig:
    """The configuration with every choice made. On CPU it is the same."""
    sections: dict[str, dict[str, Any]] = {}
    drafter = config.drafter
    models = drafter.models if isinstance(drafter, DraftModelConfig) else {}
    for choice in choices(config, gpu):
        name, _, key = choice.field.rpartition(".")
        section = models[name] if name in models else getattr(config, name)
        if not choice.written and getattr(section, key) != choice.value:
            sections.setdefault(name, {})[key] = choice.value
    if isinstance(drafter, DraftModelConfig) and drafter.also:
        _, *others = models
        also = [models[name].model_copy(update=sections.pop(name, {})) for name in others]
        sections.setdefault("drafter", {})["also"] = also
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed) if changed else config


def _of_draft_model(section: str, engine: DraftEngineConfig, gpu: bool) -> list[Choice]:
    chunk = _choice(
        engine,
        f"{section}.prefill_chunk_tokens",
        GPU_PREFILL_CHUNK_TOKENS,
        gpu,
        "a chunk takes about as long as a few draft steps",
        "a longer chunk delays proposals",
    )
    head = _choice(
        engine,
        f"{section}.draft_vocab_size",
        0,
        gpu,
        "the whole output head: cutting it was measured on CPU only",
        "what it was trained on, else 32768 of a vocabulary twice as large: the head is a large part of a step",
    )
    return [_batch(engine, f"{section}.max_num_seqs", gpu), chunk, head]


def _batch(section: Section, field: str, gpu: bool) -> Choice:
    return _choice(
        section,
        field,
        GPU_MAX_NUM_SEQS,
        gpu,
        "a step of many requests takes hardly longer than of one",
        "a step takes the longer the more requests it has",
    )


def _deadlines(config: OutriderConfig, gpu: bool) -> list[Choice]:
    link = config.link
    written = "round_deadline_ms" in link.model_fields_set
    steps = _choice(
        link,
        "link.round_deadline_steps",
        # Whoever wrote a deadline in milliseconds means it.
        None if written else GPU_ROUND_DEADLINE_STEPS,
        gpu,
        "link.round_deadline_ms is written"
        if written
        else "waiting longer than two of the target's steps, as measured while it runs, costs more than drafts give",
        "link.round_deadline_ms alone",
    )
    round_ms = _choice(
        link,
        "link.round_deadline_ms",
        GPU_ROUND_DEADLINE_MS,
        gpu,
        "until the target's step has been measured, and never longer",
        "a draft step takes tens of milliseconds on a core, and a prefill chunk may come first",
    )
    link_ms = _choice(
        link,
        "link.link_deadline_ms",
        # Never at or below a round's deadline that is written.
        max(GPU_LINK_DEADLINE_MS, 2 * float(round_ms.value)),
        gpu,
        "a drafter beats its heart four times as often; plain decoding meanwhile costs every request",
        "a process that has to share its core may be silent for seconds",
    )
    return [steps, round_ms, link_ms]


def _choice(section: Section, field: str, on_gpu: Any, gpu: bool, why_on_gpu: str, why_on_cpu: str) -> Choice:
    key = field.rpartition(".")[2]
    value = getattr(section, key)
    if key in section.model_fields_set:
        return Choice(field, value, "as the configuration says", written=True)
    return Choice(field, on_gpu, f"GPU: {why_on_gpu}") if gpu else Choice(field, value, f"CPU: {why_on_cpu}")
