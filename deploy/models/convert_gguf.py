"""Turn a GGUF file into a bfloat16 Hugging Face checkpoint.

    python -m outrider.deploy.models.convert_gguf FILE.gguf DIRECTORY [--tie-embeddings]

The file is mapped, and its tensors are dequantised and written one after the other: what is in memory at a time is one
shard of the checkpoint. Runs as a process of its own all the same, since PyTorch and transformers should not stay in
memory beside an engine. Prints its stages on stdout. The result is complete only when the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

SHARD_BYTES = 500_000_000
"""Largest file of the checkpoint, unless one tensor is larger."""

CHUNK_VALUES = 1 << 22
"""Dequantised at once: 16 MiB of float32, and several times that in the making."""

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


def convert(gguf: Path, out: Path, tie_embeddings: bool) -> None:
    """Write the checkpoint to ``out``. tie_embeddings: see ``ModelSource.tie_embeddings``.

    Raises ValueError when the file holds a tensor too many or too few for its model, or is of an architecture whose
    layout is not known here.
    """
    _stage("loading PyTorch and transformers")
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _stage("reading the tokenizer")
    out.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings = config.tie_word_embeddings or tie_embeddings
    with torch.device("meta"):  # names and shapes, no weights
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _stage("dequantising the weights to bfloat16")
    reader = GGUFReader(gguf)
    write_weights(_sources(reader, model), _layout(reader, config), out)
    _stage("writing the configuration")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    write_rope_theta(out / "config.json")


def write_weights(
    sources: Mapping[str, tuple[ReaderTensor, tuple[int, ...]]],
    layout: Callable[[str, torch.Tensor], torch.Tensor],
    out: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Safetensors files of at most ``shard_bytes``, and their index when they are several.

    sources: GGUF tensor and shape of each of the checkpoint's. layout: puts a tensor of
    that GGUF name into the order of the checkpoint's.
    """
    from safetensors.torch import save_file

    shards = split([(name, 2 * _count(shape)) for name, (_, shape) in sources.items()], shard_bytes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(files) == 1:
        files = ["model.safetensors"]
    done = 0
    for file, names in zip(files, shards, strict=True):
        tensors = {}
        for name in names:
            source, shape = sources[name]
            tensors[name] = layout(source.name, dequantised(source)).reshape(shape).contiguous()
            done += 1
            _stage(f"dequantising tensor {done} of {len(sources)}")
        save_file(tensors, out / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(2 * _count(shape) for _, shape in sources.values())},
            "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def dequantised(tensor: ReaderTensor) -> torch.Tensor:
    """A GGUF tensor in bfloat16, rows first. Each value is computed in float32 and rounded once."""
    import torch
    from gguf import dequantize

    columns, *rows = (int(size) for size in tensor.shape)  # GGUF has the innermost first
    shape = (*reversed(rows), columns)
    packed = tensor.data.reshape(-1, tensor.data.shape[-1])
    values = torch.empty((packed.shape[0], columns), dtype=torch.bfloat16)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, packed.shape[0], step):
        chunk = dequantize(packed[start : start + step], tensor.tensor_type)
        values[start : start + step] = torch.tensor(chunk)
    _let_go(tensor.data)
    return values.reshape(shape)


def _let_go(array: np.ndarray) -> None:
    """Of the pages of a mapped file, which otherwise count as this process's memory to the end."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def split(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names in their order, in groups whose sizes add up to ``limit`` at most, or of one."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def write_rope_theta(config_file: Path) -> None:
    """transformers 5 writes rope_parameters only; readers of the older key would silently use 10000."""
    config = json.loads(config_file.read_text())
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[heads * head size, inputs] of a llama's query or key. GGUF interleaves the two halves of each head, as ggml's
    rotary embedding wants them; transformers has one half behind the other."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _sources(reader: GGUFReader, model: Any) -> dict[str, tuple[ReaderTensor, tuple[int, ...]]]:
    """GGUF tensor and shape of each tensor that the model's checkpoint holds. Raises ValueError."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = _architecture(reader)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tied = model.config.tie_word_embeddings
    sources = {}
    for name, parameter in model.state_dict().items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tied and theirs == _OUTPUT:
            continue
        if tied and theirs == _EMBEDDING and _OUTPUT in tensors:
            del tensors[_EMBEDDING]
            theirs = _OUTPUT  # of the two copies the output matrix is the finer quantised one
        if theirs not in tensors:
            raise ValueError(f"the GGUF file has no tensor for {name}")
        sources[name] = tensors.pop(theirs), tuple(parameter.shape)
    if tensors:
        raise ValueError(f"the GGUF file has tensors that its model does not know: {', '.join(sorted(tensors)[:5])}")
    return sources


def _layout(reader: GGUFReader, config: Any) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """What turns a tensor of the architecture, by its GGUF name, into transformers' order of rows."""
    architecture = _architecture(reader)
    if architecture == "qwen2":
        return lambda name, tensor: tensor
    if architecture != "llama":
        raise ValueError(f"the GGUF file's architecture is {architecture}; only llama and qwen2 can be converted")
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}

    def of_llama(name: str, tensor: torch.Tensor) -> torch.Tensor:
        num_heads = next((count for part, count in heads.items() if part in name and tensor.dim() == 2), None)
        return tensor if num_heads is None else unpermuted(tensor, num_heads)

    return of_llama


def _architecture(reader: GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


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
