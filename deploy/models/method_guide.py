"""Which speculation method fits a target, and why: the selection guide as code. Pure: reads no file, loads nothing.

It begins with what a checkpoint's config.json says it is: a language model, one with layers that predict ahead, or
drafting heads, by the names of the checkpoints that vLLM's loaders know. What is said about load and speed-ups comes
from the sources named beside it, not from a measurement of this machine; `outrider bench` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.co_located_config import CO_LOCATED_METHODS, GPU_ONLY_METHODS, REFUSED_METHODS
from outrider.cluster.drafter_config import REMOTE_METHODS

ModelJson = Mapping[str, Any]

_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers")

_MTP_FAMILIES = (
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_mtp", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "glm_ocr",
    "glm5_next", "mimo", "ernie4_5_moe", "nemotron_h", "exaone_moe", "exaone4_5", "qwen3_next", "qwen3_5", "qwen4_exp",
    "longcat_flash", "bailing_hybrid", "bailing_moe", "minimax_m3", "kimi_k3", "pangu_ultra_moe", "step3p5", "step3p7",
    "hy_v3", "hy_v4", "inkling", "dots3_note", "intern_s2", "interns2", "gemma4_assistant",
)  # fmt: skip
"""Beginnings of the model types whose extra layers vLLM 0.32 can draft with."""


@dataclass(frozen=True)
class CheckpointKind:
    architecture: str
    """The first in config.json; empty without one."""

    kind: str
    """``model``, or the method whose drafting heads it holds: eagle, eagle3, medusa, dflash, dspark, mlp_speculator."""

    vocab_size: int | None
    hidden_size: int | None
    target_hidden_size: int | None
    """Heads: of the target they were trained for, as far as it says."""

    mtp_layers: int
    """Layers that predict further tokens; 0 for none."""

    mtp_family: bool
    """Whether vLLM drafts with such layers of this kind of model."""

    num_parameters: int | None
    """Estimated from the shapes of a dense decoder; None where that is no good guess (mixture of experts)."""


def text_model(document: ModelJson) -> ModelJson:
    """The language model's part of a config.json; multimodal checkpoints nest it."""
    nested = document.get("text_config")
    return nested if isinstance(nested, dict) else document


def kind_of(document: ModelJson) -> CheckpointKind:
    """document: a decoded config.json."""
    model = text_model(document)
    architecture = str(next(iter(document.get("architectures") or ()), ""))
    kind = _kind(document, architecture)
    hidden = _whole(model, "hidden_size")
    model_type = str(document.get("model_type") or model.get("model_type") or "")
    return CheckpointKind(
        architecture=architecture,
        kind=kind,
        vocab_size=_whole(model, "vocab_size"),
        hidden_size=hidden,
        target_hidden_size=None if kind == "model" else (_whole(model, "target_hidden_size") or hidden),
        mtp_layers=_mtp_layers(document, model),
        mtp_family=model_type.startswith(_MTP_FAMILIES) or architecture.startswith("MiMo"),
        num_parameters=_num_parameters(model),
    )


def _kind(document: ModelJson, architecture: str) -> str:
    name, model_type = architecture.lower(), str(document.get("model_type", "")).lower()
    if "speculators_model_type" in document:  # the format of vLLM's speculators library says it outright
        return str(document["speculators_model_type"])
    for method in ("mlp_speculator", "medusa"):
        if model_type == method or name.startswith(method.replace("_", "")):
            return method
    for method, mark in (("dspark", "dspark"), ("dflash", "dflash"), ("eagle3", "eagle3"), ("eagle", "eagle")):
        if mark in name or model_type == method or f"{method}_config" in document:
            return method
    if "draft_vocab_size" in document and "ForCausalLM" in architecture:
        return "eagle3"
    return "model"


def _mtp_layers(document: ModelJson, model: ModelJson) -> int:
    places = (document, model, document.get("mtp_config") or {})
    return max((_whole(place, key) or 0 for place in places for key in _MTP_KEYS), default=0)


def _num_parameters(model: ModelJson) -> int | None:
    if any(key in model for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")):
        return None
    hidden, layers = _whole(model, "hidden_size"), _whole(model, "num_hidden_layers")
    width, vocab = _whole(model, "intermediate_size"), _whole(model, "vocab_size")
    heads = _whole(model, "num_attention_heads")
    if not (hidden and layers and width and vocab and heads):
        return None
    head_dim = _whole(model, "head_dim") or hidden // heads
    kv_heads = _whole(model, "num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = vocab * hidden * (1 if model.get("tie_word_embeddings") else 2)
    return layers * (attention + 3 * hidden * width) + embeddings


def _whole(place: Any, key: str) -> int | None:
    value = place.get(key) if isinstance(place, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


FITS, POSSIBLE, REFUSED = "fits", "possible", "refused"
"""Can be used as things are; needs something that is not here; cannot be used."""

SMALLEST_RATIO = 3.0
"""A draft model should have at most a third of the target's weights: each draft step reads all of its own."""

NEEDS_HIDDEN_STATES = "needs the target's hidden states or weights, so it runs inside the target's engine"

WHEN: dict[str, str] = {
    "draft_model": "any text; the gain shrinks with load, and the length controller stops it in time",
    "ngram": "answers that repeat their prompt: edits, summaries, retrieval; costs nothing where they do not",
    "suffix": "answers that repeat each other: agents, code, templates (1.8 to 4.5 times on agents, arXiv 2411.04975)",
    "eagle": "low to middle load; heads for this very target (1.5 to 2.8 times at batch 1, arXiv 2401.15077)",
    "eagle3": "low to middle load; the best heads there are for most targets (arXiv 2503.01840)",
    "medusa": "old heads; eagle3 accepts more (arXiv 2401.10774)",
    "mtp": "models that bring the layer along: the cheapest draft there is, good at every load but the highest",
    "dflash": "low load, long drafts: all of them in one pass",
    "dspark": "low load, long drafts",
    "ngram_gpu": "as ngram, without the trip to the host",
}
"""Method -> for which texts and loads."""

LOAD_ADVICE = (
    "Load: a fixed number of drafts falls below no speculation at high concurrency (7,852 against 8,879 tok/s at 256, "
    "vllm#52362). Remote drafting chooses the number for each request and round and stops by itself; co-located "
    "drafting does not, so set num_speculative_tokens_per_batch_size there, or lower num_speculative_tokens.",
    "Memory: a remote drafter takes nothing from the target's KV cache; co-located weights and KV do.",
    "Hardware: a remote draft model needs cores or GPUs of its own. Overlap gains most at batch 1 to 8 and where the "
    "drafter's hardware is small beside the target's; count tok/s per accelerator, not per deployment.",
)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is here and could draft for the target."""

    name: str
    """Its directory."""

    kind: CheckpointKind
    same_tokens: bool | None
    """Whether the two tokenizers agree token for token; None: they could not be compared."""


@dataclass(frozen=True)
class Build:
    """What is installed."""

    gpu: bool
    arctic_inference: bool


@dataclass(frozen=True)
class Advice:
    method: str
    placement: str
    """``remote`` or ``co_located``; ``-`` for what runs in neither."""

    verdict: str
    reason: str
    model: str | None = None
    """The checkpoint to name in ``drafter.model``."""


def advise(target: CheckpointKind, candidates: Sequence[Candidate], build: Build) -> list[Advice]:
    """One line for each method and place, what fits first."""
    found = [_remote(method, target, candidates) for method in REMOTE_METHODS]
    found += [_co_located(method, target, candidates, build) for method in CO_LOCATED_METHODS]
    found.append(Advice("mlp_speculator", "-", REFUSED, REFUSED_METHODS["mlp_speculator"]))
    order = (FITS, POSSIBLE, REFUSED)
    return sorted(found, key=lambda advice: order.index(advice.verdict))


def _remote(method: str, target: CheckpointKind, candidates: Sequence[Candidate]) -> Advice:
    if method != "draft_model":
        return Advice(method, "with_target", FITS, WHEN[method])
    return _draft_model("with_target", target, candidates)


def _co_located(method: str, target: CheckpointKind, candidates: Sequence[Candidate], build: Build) -> Advice:
    if method in GPU_ONLY_METHODS and not build.gpu:
        return Advice(method, "co_located", REFUSED, f"not on CPU: {GPU_ONLY_METHODS[method]}")
    if method == "suffix" and not build.arctic_inference:
        return Advice(
            method, "co_located", REFUSED, "vLLM's own needs the package arctic-inference; the remote one needs nothing"
        )
    if method in ("ngram", "ngram_gpu", "suffix"):
        return Advice(method, "co_located", FITS, f"{WHEN[method]}; searches on the engine's own thread")
    if method == "draft_model":
        return _draft_model("co_located", target, candidates)
    if method == "mtp":
        return _mtp(target)
    return _heads(method, target, candidates)


def _draft_model(placement: str, target: CheckpointKind, candidates: Sequence[Candidate]) -> Advice:
    fitting, misfits = [], []
    for candidate in candidates:
        if candidate.kind.kind != "model":
            continue
        if (problem := _misfit(target, candidate, placement)) is None:
            fitting.append(candidate)
        else:
            misfits.append(f"{candidate.name}: {problem}")
    if fitting:
        best = min(fitting, key=lambda candidate: abs((_ratio(target, candidate) or 8.0) - 8.0))
        ratio = _ratio(target, best)
        size = f"{ratio:.1f} times smaller" if ratio is not None else "size not comparable"
        more = f", {len(fitting) - 1} more here" if len(fitting) > 1 else ""
        return Advice("draft_model", placement, FITS, f"same tokenizer, {size}{more}; {WHEN['draft_model']}", best.name)
    reason = "needs a smaller model of the same tokenizer, and none is here"
    if misfits:
        reason += f" ({'; '.join(misfits[:2])})"
    return Advice("draft_model", placement, POSSIBLE, reason)


def _misfit(target: CheckpointKind, candidate: Candidate, placement: str) -> str | None:
    if candidate.same_tokens is False:
        return "another tokenizer"
    # One tokenizer may be padded to two sizes, which vLLM's own draft_model refuses.
    if candidate.kind.vocab_size != target.vocab_size and (placement == "co_located" or candidate.same_tokens is None):
        return f"vocabulary of {candidate.kind.vocab_size} tokens, the target's has {target.vocab_size}"
    ratio = _ratio(target, candidate)
    if ratio is not None and ratio < SMALLEST_RATIO:
        return f"only {ratio:.1f} times smaller than the target; {SMALLEST_RATIO:g} times at least is worth a try"
    return None


def _ratio(target: CheckpointKind, candidate: Candidate) -> float | None:
    if not target.num_parameters or not candidate.kind.num_parameters:
        return None
    return target.num_parameters / candidate.kind.num_parameters


def _mtp(target: CheckpointKind) -> Advice:
    if not target.mtp_layers:
        return Advice(
            "mtp", "co_located", REFUSED, "the target's config.json names no layers that predict further tokens"
        )
    if not target.mtp_family:
        return Advice(
            "mtp", "co_located", REFUSED, f"vLLM 0.32 does not draft with the extra layers of {target.architecture}"
        )
    layers = f"{target.mtp_layers} layer{'s' if target.mtp_layers > 1 else ''} of its own"
    return Advice("mtp", "co_located", FITS, f"{layers}, if its weights are in the checkpoint; {WHEN['mtp']}")


def _heads(method: str, target: CheckpointKind, candidates: Sequence[Candidate]) -> Advice:
    wrong = None
    for candidate in candidates:
        if candidate.kind.kind != method:
            continue
        size = candidate.kind.target_hidden_size
        if size in (None, target.hidden_size):
            return Advice(
                method, "co_located", FITS, f"heads of the right width are here; {WHEN[method]}", candidate.name
            )
        wrong = f"{candidate.name} is for a hidden size of {size}, the target's is {target.hidden_size}"
    return Advice(
        method, "co_located", POSSIBLE, wrong or f"{NEEDS_HIDDEN_STATES}, with heads trained for it; none are here"
    )
