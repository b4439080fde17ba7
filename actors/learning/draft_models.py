"""Loads draft models for training, through Transformers."""

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
    """Loads a model without gradients."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    return model.to(torch.device(device)).eval().requires_grad_(False)


def local_copy(model: str, revision: str | None) -> Path:
    """Returns a checkpoint's directory; a hub id's is fetched where it is missing. Raises what the hub's client
    raises."""
    from huggingface_hub import snapshot_download

    path = Path(model).expanduser()
    return path if path.is_dir() else Path(snapshot_download(model, revision=revision))


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of a checkpoint's safetensors files, by name."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                yield name, opened.get_tensor(name)
