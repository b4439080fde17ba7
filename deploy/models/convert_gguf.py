"""Converts a GGUF file to a bfloat16 Hugging Face checkpoint by transformers' own reader.

    python -m outrider.deploy.models.convert_gguf FILE.gguf DIRECTORY [--tie-embeddings]

It runs as a process of its own, so that PyTorch does not stay in memory beside an engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def convert(gguf: Path, out: Path, tie_embeddings: bool) -> None:
    """Writes the checkpoint to a directory. tie_embeddings: as in ``ModelSource``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    # Without dequantize the weights would stay packed, and packed ones cannot be saved.
    packed = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=packed
    )
    if tie_embeddings:  # of the two copies the output matrix is the finer quantised one
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
        model.config.tie_word_embeddings = True
    model.save_pretrained(out)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the file
    convert(Path(sys.argv[1]), Path(sys.argv[2]), tie_embeddings="--tie-embeddings" in sys.argv)
