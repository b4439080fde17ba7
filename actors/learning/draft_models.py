"""Draft models as they are trained. Thin over transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders whose layers follow one another unchanged, so that some of them are a model of the same kind."""


def load(checkpoint: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """For reading: nothing of it is trained."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    # Answers are what the target says by itself: a checkpoint's own penalties and cuts would be others' distributions.
    known = model.generation_config
    ends, pad = known.eos_token_id, known.pad_token_id
    first = ends[0] if isinstance(ends, list) else ends
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=first if pad is None else pad)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model.to(torch.device(device)).eval().requires_grad_(False)


def end_tokens(model: PreTrainedModel) -> set[int]:
    return _all(model.generation_config.eos_token_id)


def ends_of(checkpoint: Path) -> set[int]:
    """`end_tokens` of a checkpoint that is not loaded."""
    from transformers import AutoConfig, GenerationConfig

    try:
        known = GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    except OSError:  # it has none of its own
        known = GenerationConfig.from_model_config(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    return _all(known.eos_token_id)


def _all(ends: int | list[int] | None) -> set[int]:
    return set() if ends is None else set(ends if isinstance(ends, list) else [ends])


def freeze(drafter: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Embeddings and head stay as they are, in dtype; the names of the tensors that are trained."""
    drafter.requires_grad_(True)
    for module in (drafter.get_input_embeddings(), drafter.get_output_embeddings()):
        module.weight.requires_grad_(False)
        module.weight.data = module.weight.data.to(dtype)
    return [name for name, parameter in drafter.named_parameters() if parameter.requires_grad]


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint's safetensors files, by name."""
    from safetensors import safe_open

    places: dict[str, Path] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    for name in sorted(places):
        with safe_open(places[name], "pt") as opened:
            yield name, opened.get_tensor(name)
