"""Tiny random heads for the tiny Llama, one checkpoint for each method that needs trained ones: plumbing, not speed.

Each has the tensors and the config.json that vLLM's own loader for its kind asks for. Drafts are nonsense, so almost
all are rejected, and what is served must still be what the target alone would say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.tiny_models import EOS, VOCAB_SIZE, build_tiny_llama, write_tokenizer

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 128, 256, 4, 2  # those of the tiny Llama
HEAD_DIM = HIDDEN // HEADS
NUM_MEDUSA_HEADS = NUM_MLP_HEADS = 3
MLP_WIDTH = 96
MASK_TOKEN = VOCAB_SIZE - 1

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


class _Random:
    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), generator=self._generator) * 0.1

    def layer(self, prefix: str, attention_width: int = HIDDEN) -> dict[str, Tensor]:
        """A decoder layer. attention_width: of what the queries, keys and values are made from."""
        return {
            f"{prefix}.self_attn.q_proj.weight": self.matrix(HEADS * HEAD_DIM, attention_width),
            f"{prefix}.self_attn.k_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, attention_width),
            f"{prefix}.self_attn.v_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, attention_width),
            f"{prefix}.self_attn.o_proj.weight": self.matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": self.matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": self.matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": self.matrix(HIDDEN, FEED_FORWARD),
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }


def build_eagle(path: Path) -> Path:
    """Build a decoder layer behind a projection of embedding and hidden state. Embedding and head are the target's."""
    random = _Random()
    tensors = {"fc.weight": random.matrix(HIDDEN, 2 * HIDDEN), **random.layer("layers.0")}
    del tensors["layers.0.input_layernorm.weight"]  # the first layer has none
    return _write(path, {**_LLAMA, "architectures": ["LlamaForCausalLM"]}, tensors)


def build_eagle3(path: Path) -> Path:
    """Build a layer over embedding and hidden state, fed from three of the target's layers; its own head."""
    random = _Random()
    tensors = {
        "fc.weight": random.matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random.matrix(VOCAB_SIZE, HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        **random.layer("midlayer", attention_width=2 * HIDDEN),
    }
    config = {**_LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB_SIZE}
    return _write(path, {**config, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, tensors)


def build_medusa(path: Path) -> Path:
    """Build one residual block and one output head for each position."""
    random = _Random()
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_MEDUSA_HEADS):
        tensors[f"blocks.{head}.layers.0.weight"] = random.matrix(HIDDEN, HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = random.matrix(VOCAB_SIZE, HIDDEN)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB_SIZE,
        "medusa_num_heads": NUM_MEDUSA_HEADS,
        "medusa_num_layers": 1,
        "torch_dtype": "float32",
    }
    return _write(path, config, tensors)


def build_dflash(path: Path) -> Path:
    """Build one Qwen3 layer that sees the target's hidden states as its context, and a mask token for each draft."""
    random = _Random()
    tensors = {
        "fc.weight": random.matrix(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "layers.0.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        "layers.0.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        **random.layer("layers.0"),
    }
    config = {
        **_LLAMA,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "head_dim": HEAD_DIM,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK_TOKEN},
    }
    return _write(path, config, tensors)


def build_mtp_target(path: Path) -> Path:
    """A target of MiMo's architecture, Qwen2 with a layer that predicts one token more: mtp has no other checkpoint."""
    from safetensors.torch import load_file

    plain = build_tiny_llama(path.with_name(f"{path.name}-llama"))
    random = _Random()
    tensors = load_file(plain / "model.safetensors")
    for layer, prefix in enumerate(("model.layers.0", "model.layers.1", "model.mtp_layers.0")):
        if layer == 2:
            tensors.update(random.layer(prefix))
        for name, rows in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(rows)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(HIDDEN)
    tensors["model.mtp_layers.0.input_proj.weight"] = random.matrix(HIDDEN, 2 * HIDDEN)
    config = {**_LLAMA, "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_hidden_layers": 2}
    _write(path, {**config, "num_nextn_predict_layers": 1}, tensors)
    write_tokenizer(path)
    return path


def build_mlp_speculator(path: Path, scale_input: bool = False) -> Path:
    """Build three heads, each of an embedding, a projection, a norm with scale and shift, and an output layer."""
    random = _Random()
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_MLP_HEADS):
        tensors[f"speculator.emb.{head}.weight"] = random.matrix(VOCAB_SIZE, MLP_WIDTH)
        tensors[f"speculator.proj.{head}.weight"] = random.matrix(MLP_WIDTH, MLP_WIDTH if head else HIDDEN)
        tensors[f"speculator.ln.{head}.weight"] = 1 + random.matrix(1, MLP_WIDTH)[0]
        tensors[f"speculator.ln.{head}.bias"] = random.matrix(1, MLP_WIDTH)[0]
        tensors[f"speculator.head.{head}.weight"] = random.matrix(VOCAB_SIZE, MLP_WIDTH)
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": VOCAB_SIZE,
        "emb_dim": HIDDEN,
        "inner_dim": MLP_WIDTH,
        "n_predict": NUM_MLP_HEADS,
        "scale_input": scale_input,
        "tie_weights": False,
    }
    return _write(path, config, tensors)


def fit_mlp_speculator(path: Path, target: Path, texts: Sequence[Sequence[int]], steps: int = 60) -> Path:
    """Train the heads on these texts of the target, by heart: drafts of the same texts are mostly accepted."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from outrider.actors.drafter.mlp_speculator import MLPSpeculator

    build_mlp_speculator(path)
    speculator = MLPSpeculator.load(path, torch.float32, "cpu")
    weights = [weight.requires_grad_() for head in speculator.heads for weight in head]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    optimizer = torch.optim.Adam(weights, 1e-2)
    inputs = []
    for text in texts:
        tokens = torch.tensor(text)
        with torch.no_grad():
            inputs.append((model.model(tokens[None]).last_hidden_state[0], tokens))
    for _ in range(steps):
        loss = torch.zeros(())
        for hidden, tokens in inputs:
            count = len(tokens) - NUM_MLP_HEADS - 1
            state = speculator.first_state(hidden[:count])
            for index in range(NUM_MLP_HEADS):
                state = speculator.next(index, state, tokens[index + 1 :][:count])
                logits = torch.nn.functional.linear(state, speculator.heads[index].head)
                loss = loss + torch.nn.functional.cross_entropy(logits, tokens[index + 2 :][:count])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = load_file(path / "model.safetensors")
    for index, head in enumerate(speculator.heads):
        names = ("emb.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight")
        tensors |= {f"speculator.{name.format(index)}": each.detach() for name, each in zip(names, head, strict=True)}
    return _write(path, json.loads((path / "config.json").read_text()), tensors)


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
