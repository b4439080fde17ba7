"""Loads the target, and makes a drafter of its layers or of another drafter, by transformers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning.draft_models import SUPPORTED, tensors_of
from outrider.actors.learning.texts import TOP
from outrider.actors.vllm_adapter.offline_answers import Engine
from outrider.cluster.config import ConfigError, EngineConfig
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy import preset
from outrider.deploy.models.check import check_vocabularies, read_model_json
from outrider.deploy.models.fetch import fetch_from_hub
from outrider.deploy.models.store import BY_HUB_ID, find_copy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outrider.actors.learning.texts import Text

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def keep_large_blocks() -> None:
    """Makes glibc keep freed memory for later allocations of this process.

    By default it returns large blocks to the system and gets zeroed pages again. A training step on CPU needs hundreds
    of them, which took half of its time in a sandbox with slow page faults.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(-4, 0)  # M_MMAP_MAX
        library.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def locate(model: str, option: str) -> Path:
    """Returns the directory of a checkpoint. A hub id is looked up among fetched models, then downloaded. Raises
    ConfigError."""
    copy = find_copy(source) if (source := BY_HUB_ID.get(model)) else None
    found = Path(preset.locate(str(copy or model), option))
    return found if found.is_absolute() else fetch_from_hub(model, None)


def check_architecture(checkpoint: Path, option: str) -> dict[str, Any]:
    """Returns a checkpoint's config.json. Raises ConfigError unless drafters of its architecture can be made."""
    document = read_model_json(EngineConfig(model=str(checkpoint)), option)
    architecture = (document.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise ConfigError(
            f"{option}: {checkpoint.name} is a {architecture}; drafters can be made of {', '.join(SUPPORTED)}"
        )
    return document


def check_same_tokens_of(target: Path, drafter: Path) -> None:
    """Raises ConfigError if the token ids of the two checkpoints may mean different tokens."""
    of_target, of_drafter = (read_model_json(EngineConfig(model=str(path)), "model") for path in (target, drafter))
    check_vocabularies(of_target, of_drafter, (read_vocabulary(str(target)), read_vocabulary(str(drafter))))


def device_and_dtype(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """Returns device and type of the command line. auto: a GPU if there is one, and the fastest type of the device."""
    import torch

    from outrider.actors.learning.train import fastest_dtype

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, fastest_dtype(device) if dtype == "auto" else getattr(torch, dtype)


def engine(checkpoint: Path, document: dict[str, Any], dtype: torch.dtype, device: str, max_model_len: int) -> Engine:
    """Returns the engine that generates the target's texts. document: its config.json."""
    ends, top = ends_of(checkpoint), min(TOP, int(document["vocab_size"]))
    named = str(dtype).removeprefix("torch.")
    return Engine(str(checkpoint), document, named, device, max_model_len, top, tuple(sorted(ends)))


def ends_of(checkpoint: Path) -> set[int]:
    """Returns the tokens that end an answer."""
    from transformers import AutoConfig, GenerationConfig

    try:
        known = GenerationConfig.from_pretrained(checkpoint, local_files_only=True)
    except OSError:  # it has none of its own
        known = GenerationConfig.from_model_config(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    ends = known.eos_token_id
    return set() if ends is None else set(ends if isinstance(ends, list) else [ends])


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int, always: set[int]) -> torch.Tensor:
    """Returns the ids with the highest total probability in the target's texts, ascending, int64 [size].

    Args:
        always: Ids that are included in any case.
    """
    import torch

    expected = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        likely = torch.from_numpy(text.top_log_p).flatten().double().exp()
        expected.index_add_(0, torch.from_numpy(text.top_ids).long().flatten(), likely)
    expected[sorted(always)] = torch.inf
    # A stable sort breaks ties by id, as on every machine.
    return expected.sort(descending=True, stable=True).indices[:size].sort().values


def choose_layers(total: int, count: int) -> list[int]:
    """Returns the layers of the target that a drafter starts from: the first, the last, and others evenly between.

    Layers in the middle change the residual stream least, so each can stand for its neighbours, as in DistilBERT (Sanh
    et al., 1910.01108), which takes every other. A single one is the first. Raises ConfigError.
    """
    if not 1 <= count < total:
        raise ConfigError(f"--layers: {count} is not in 1 to {total - 1}; the target has {total} layers")
    if count == 1:
        return [0]
    return [round(index * (total - 1) / (count - 1)) for index in range(count)]


def config_of_layers(document: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """Returns the config.json of a model with these layers."""
    changed = {**document, "num_hidden_layers": len(layers)}
    if document.get("layer_types"):
        changed["layer_types"] = [document["layer_types"][index] for index in layers]
    return changed


def load_tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


def from_layers(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Returns a float32 model of these layers, with copies of the target's embeddings, last norm and head."""
    from transformers import AutoModelForCausalLM

    config = type(target.config).from_dict(config_of_layers(target.config.to_dict(), layers))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    renamed = {
        name.replace(f"model.layers.{old}.", f"model.layers.{new}.", 1): tensor
        for new, old in enumerate(layers)
        for name, tensor in target.state_dict().items()
        if name.startswith(f"model.layers.{old}.")
    }
    rest = {name: tensor for name, tensor in target.state_dict().items() if not name.startswith("model.layers.")}
    model.load_state_dict({**rest, **renamed})
    return model


def same_embeddings(target: Path, drafter: Path) -> bool:
    """Returns whether a drafter's embeddings and head equal the target's."""
    import torch

    theirs = {name: tensor for name, tensor in tensors_of(target) if name in (EMBEDDING, HEAD)}
    ours = {name: tensor for name, tensor in tensors_of(drafter) if name in (EMBEDDING, HEAD)}
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
