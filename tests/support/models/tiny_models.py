"""Tiny random-weight Llama checkpoints with a byte tokenizer, for tests of plumbing. Built in a second, no downloads.

Token id = byte value; 256 ends a text. The logits are spread wide, so that float32 rounding between batch shapes
does not flip greedy choices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

VOCAB_SIZE = 272
EOS = 256


def build_tiny_llama(
    path: Path, *, max_positions: int = 2048, noise_of: Path | None = None, noise: float = 0.0, head_dim: int = 32
) -> Path:
    """Write a checkpoint, unless it is already there.

    head_dim: vLLM's CPU attention takes none smaller than 32.
    noise_of: start from that checkpoint's weights and add Gaussian noise of relative size noise: a drafter that
    agrees with the target often, not always.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if (path / "config.json").exists():
        return path
    generator = torch.Generator().manual_seed(len(path.name))
    if noise_of is not None:
        model = AutoModelForCausalLM.from_pretrained(noise_of, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    else:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            head_dim=head_dim,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_positions,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=EOS,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        model.lm_head.weight.data *= 2.0
        # Only printable ASCII comes out: stop strings can be tested, and no text ends by chance.
        model.lm_head.weight.data[:32] = 0.0
        model.lm_head.weight.data[127:] = 0.0
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


def pad_vocabulary(path: Path, of: Path, vocab_size: int) -> Path:
    """Write another checkpoint's weights with more rows in embedding and output head, as families pad their larger
    models further. Real padding is next to never chosen; two rows of this one are likelier than real tokens."""
    from transformers import AutoModelForCausalLM

    if (path / "config.json").exists():
        return path
    model = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
    known = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    first, count = ord("0"), 2
    generator = torch.Generator().manual_seed(3)
    embedding, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    embedding[known:] = torch.randn(embedding[known:].shape, generator=generator) * 0.1
    head[known:] = 0.0
    head[known : known + count] = head[first : first + count] * 1.1
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


MASK = VOCAB_SIZE - 1
"""The mask token of `build_one_pass`."""


def build_one_pass(path: Path, of: Path) -> Path:
    """Write a draft model as PARD's are: a checkpoint's weights with a mask token, which its head likes best of all.

    The token after a text is the checkpoint's own, and those after masks are little better than any."""
    from safetensors.torch import load_file, save_file

    if (path / "config.json").exists():
        return path
    shutil.copytree(of, path)
    tensors = load_file(of / "model.safetensors")
    tensors["lm_head.weight"][MASK] = 1.5 * tensors["lm_head.weight"][32:127].mean(0) + tensors["lm_head.weight"][101]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "pard_token": MASK}))
    return path


CONFIG = "adapter_config.json"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a Llama that adapters change."""


def build_tiny_adapter(
    path: Path, of: Path, *, rank: int = 8, seed: int = 1, scale: float = 0.5, modules: Sequence[str] = ADAPTED
) -> Path:
    """Write a LoRA adapter in PEFT's format for a checkpoint of `build_tiny_llama`, unless it is already there.

    scale: size of its change of a weight, relative to the weight: large enough for other answers than the model's own.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    if (path / CONFIG).exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(of / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in modules:
                continue
            weight = weights.get_tensor(name)
            size = (scale * float(weight.std()) / rank**0.5) ** 0.5
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                values = size * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = values
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(of),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / CONFIG).write_text(json.dumps(config))
    return path


def merge_adapter(path: Path, of: Path, adapter: Path) -> Path:
    """Write another checkpoint's weights with an adapter's added to them: what PEFT calls merging."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    if (path / "config.json").exists():
        return path
    model = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
    tensors, config = load_file(adapter / "adapter_model.safetensors"), json.loads((adapter / CONFIG).read_text())
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            weight = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")).weight
            weight.data += config["lora_alpha"] / config["r"] * (b @ a)
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


def write_tokenizer(path: Path) -> None:
    """The tokenizer of these models, beside a checkpoint that was made elsewhere."""
    _byte_tokenizer().save_pretrained(path)


def _byte_tokenizer():  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = _bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def _bytes_to_unicode() -> dict[int, str]:
    """Return the printable stand-ins that byte-level tokenizers use for bytes (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in kept}
    table.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)})
    return table


def build_learnable(path: Path) -> Path:
    """A target whose first layer passes on what it gets, and whose second makes the next token from the last one,
    mostly: a drafter of the first layer starts from nothing, and can learn what the second does."""
    from safetensors.torch import load_file, save_file

    if (path / "config.json").exists():
        return path
    build_tiny_llama(path)
    tensors = load_file(path / "model.safetensors")
    for name, share in (("0.self_attn.o_proj", 0.0), ("0.mlp.down_proj", 0.0), ("1.self_attn.o_proj", 0.05)):
        tensors[f"model.layers.{name}.weight"] *= share
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def build_first_layer(path: Path, of: Path) -> Path:
    """Build a drafter that is that target's first layer."""
    import json

    from safetensors.torch import load_file, save_file

    if (path / "config.json").exists():
        return path
    shutil.copytree(of, path)
    tensors = {name: tensor for name, tensor in load_file(of / "model.safetensors").items() if ".layers.1." not in name}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return path
