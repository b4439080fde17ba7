"""From a GGUF file to a checkpoint, tensor by tensor: values, order of rows, names, shards."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from outrider.deploy.models import convert_gguf
from outrider.deploy.models.convert_gguf import dequantised, split, unpermuted, write_weights

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
Q8 = gguf.GGMLQuantizationType.Q8_0


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does for a llama's queries and keys: row i of a head's halves beside each other."""
    heads = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(weight.shape)


def write_gguf(path: Path, config: PreTrainedConfig, *, without: str = "", extra: str = "") -> dict[str, torch.Tensor]:
    """A file with random weights in 8 bits, and what a checkpoint made of it should hold."""
    model = AutoModelForCausalLM.from_config(config)
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, config.model_type)
    expected = {}
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, parameter in model.state_dict().items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None
        if theirs == without:
            continue
        # Not the initial zeros of biases and ones of norms, which would look alike.
        values = torch.randn(parameter.shape).numpy()
        if values.ndim == 2:
            values = gguf.dequantize(quantize(values, Q8), Q8)
        expected[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
        count = next((count for suffix, count in heads.items() if name.endswith(suffix)), None)
        if config.model_type == "llama" and count is not None:
            values = permuted(values, count)
        packed = quantize(values, Q8) if values.ndim == 2 else values
        writer.add_tensor(theirs, packed, raw_dtype=Q8 if values.ndim == 2 else None)
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def converted(path: Path, config: PreTrainedConfig, out: Path, shard_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    reader = gguf.GGUFReader(path)
    out.mkdir(exist_ok=True)
    write_weights(convert_gguf._sources(reader, model), convert_gguf._layout(reader, config), out, shard_bytes)
    found = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen2Config(**SIZES)], ids=["llama", "qwen2"])
def test_every_tensor_has_its_name_its_rows_in_order_and_its_values(config: PreTrainedConfig, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", config)
    assert_same(converted(tmp_path / "model.gguf", config, tmp_path / "out"), expected)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_tied_embeddings_are_the_finer_copy_and_stored_once(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", Qwen2Config(**SIZES))
    tied = Qwen2Config(**{**SIZES, "tie_word_embeddings": True})
    expected["model.embed_tokens.weight"] = expected.pop("lm_head.weight")
    assert_same(converted(tmp_path / "model.gguf", tied, tmp_path / "out"), expected)


def test_tied_embeddings_that_the_file_has_once(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf", LlamaConfig(**SIZES), without="output.weight")
    tied = LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
    assert_same(converted(tmp_path / "model.gguf", tied, tmp_path / "out"), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": "blk.1.ffn_up.weight"}, "no tensor for model.layers.1.mlp.up_proj.weight"),
        ({"extra": "blk.0.lora.weight"}, "does not know: blk.0.lora.weight"),
    ],
)
def test_a_tensor_too_many_or_too_few_is_named(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES)
    write_gguf(tmp_path / "model.gguf", config, **changes)
    with pytest.raises(ValueError, match=said):
        converted(tmp_path / "model.gguf", config, tmp_path / "out")


def test_an_architecture_whose_rows_may_be_in_another_order_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture is gemma; only llama and qwen2"):
        convert_gguf._layout(gguf.GGUFReader(tmp_path / "model.gguf"), LlamaConfig(**SIZES))


def test_one_shard_is_in_memory_at_a_time(tmp_path: Path) -> None:
    config = Qwen2Config(**SIZES)
    expected = write_gguf(tmp_path / "model.gguf", config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    seen: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        made = tensor.clone()
        seen.append(weakref.ref(made))
        most = max(most, sum(2 * each.numel() for ref in seen if (each := ref()) is not None))
        return made

    limit = 40_000
    sources = convert_gguf._sources(gguf.GGUFReader(tmp_path / "model.gguf"), model)
    write_weights(sources, layout, tmp_path, limit)
    assert 2 * sum(tensor.numel() for tensor in expected.values()) > 3 * limit
    assert most <= limit
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as tensors:
            assert torch.equal(tensors.get_tensor(name).reshape(-1), expected[name].reshape(-1)), name
    assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in expected.values())


def test_chunks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", Qwen2Config(**SIZES))
    whole = [dequantised(tensor) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    monkeypatch.setattr(convert_gguf, "CHUNK_VALUES", 7 * 64)
    chunked = [dequantised(tensor) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    assert all(torch.equal(one, other) for one, other in zip(whole, chunked, strict=True))


def test_split() -> None:
    assert split([("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 5)], 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert split([], 6) == []


def test_unpermuting_undoes_ggmls_order() -> None:
    weight = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    assert permuted(weight, 2)[:, 0].tolist() == [0, 6, 3, 9, 12, 18, 15, 21]
    assert np.array_equal(unpermuted(torch.from_numpy(permuted(weight, 2)), 2), weight)
