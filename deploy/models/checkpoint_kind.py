"""What a checkpoint's config.json says it is: a language model, one with layers that predict ahead, or drafting heads.

Pure. The names are those of the checkpoints that vLLM's loaders know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
