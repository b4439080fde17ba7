"""Checkpoints of emulated models: a config.json that says how to behave, a tokenizer, and one weight for the loader."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.bench.emulation.emulation import KEY, Emulation

ARCHITECTURE = "EmulatedForCausalLM"
EOS = 256
FIRST_WRITTEN_ID = 257
"""Ids 0 to 255 are bytes, which prompts are made of; EOS never comes by itself. From here on ids stand for words."""

HIDDEN_SIZE = 32
"""One head of 32: vLLM's CPU attention takes no smaller ones."""


def write_checkpoint(path: Path, emulation: Emulation, *, vocab_size: int, max_positions: int = 4096) -> Path:
    """Make a checkpoint directory that vLLM loads like any other, once the plugin is installed."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURE],
        # A type that transformers knows: extra keys become attributes of its configuration object.
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN_SIZE,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        KEY: emulation.as_json(),
        **({} if emulation.mask_token is None else {"pard_token": emulation.mask_token}),
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file({"anchor": torch.zeros(HIDDEN_SIZE)}, path / "model.safetensors", {"format": "pt"})
    _write_tokenizer(path, vocab_size)
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte is a token; the words above them decode, and no text encodes to them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from tests.support.models.tiny_models import _bytes_to_unicode

    vocabulary = {character: byte for byte, character in _bytes_to_unicode().items()}
    vocabulary["<eos>"] = EOS
    vocabulary.update({f"Ġw{index}": index for index in range(FIRST_WRITTEN_ID, vocab_size)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
