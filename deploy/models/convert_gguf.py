"""Turn a GGUF file into a bfloat16 Hugging Face checkpoint.

    python -m deploy.models.convert_gguf FILE.gguf DIRECTORY [--tie-embeddings]

Runs as a process of its own: it needs two to three times the checkpoint's size in memory, which must be free again
before an engine starts. Prints one line a stage on stdout. The result is complete only when the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def convert(gguf: Path, out: Path, tie_embeddings: bool) -> None:
    """Write the checkpoint to ``out``. tie_embeddings: see ``ModelSource.tie_embeddings``."""
    _stage("loading PyTorch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    _stage("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _stage("dequantising the weights to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Otherwise the weights stay packed and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    if tie_embeddings and not model.config.tie_word_embeddings:
        # Of the two copies the output matrix is the finer quantised one.
        model.get_input_embeddings().weight.data.copy_(model.get_output_embeddings().weight.data)
        model.config.tie_word_embeddings = True
        model.tie_weights()
    _stage("writing the checkpoint")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_rope_theta(out / "config.json")


def write_rope_theta(config_file: Path) -> None:
    """transformers 5 writes rope_parameters only; readers of the older key would silently use 10000."""
    config = json.loads(config_file.read_text())
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _stage(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a bfloat16 checkpoint.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tie-embeddings", action="store_true")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the file
    convert(args.gguf, args.out, args.tie_embeddings)


if __name__ == "__main__":
    main()
