"""Checks a configuration against the files of its checkpoints, before anything is started.

Of what vLLM checks itself it repeats the most frequent mistake only: ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from outrider.actors.learning.draft_models import SUPPORTED
from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, MLPSpeculatorConfig, OutriderConfig
from outrider.cluster.vocabulary import mask_token, read_vocabulary
from outrider.deploy.models.fetch import fetch_from_hub
from outrider.deploy.models.identity import check_made_for, weights_digest

ModelJson = Mapping[str, Any]
"""Type of a decoded config.json."""

_AGAIN = "fetch the model again"


def check_models(config: OutriderConfig) -> None:
    """Checks every checkpoint of ``config`` against it. Raises ConfigError naming the field and the fix.

    The config.json of a hub id is downloaded. vLLM checks co-located drafters, but not which target they were made for.
    """
    target = read_model_json(config.target, "target")
    check_tensor_parallel(target, config.target.tensor_parallel_size, "target")
    if config.drafter_model is not None and Path(config.target.model).is_dir() and Path(config.drafter_model).is_dir():
        check_made_for(Path(config.target.model), Path(config.drafter_model))
    if isinstance(config.drafter, MLPSpeculatorConfig):
        from outrider.actors.drafter.mlp_speculator import SpeculatorShape  # loads torch

        shape = SpeculatorShape.of(read_model_json(config.drafter, "drafter"))
        model = text_model(target)
        shape.check(model.get("vocab_size"), model.get("hidden_size"), config.num_speculative_tokens)
    if not isinstance(config.drafter, DraftModelConfig):
        return
    drafter = read_model_json(config.drafter, "drafter")
    check_tensor_parallel(drafter, config.drafter.tensor_parallel_size, "drafter")
    if mask_token(drafter, config.drafter.parallel_drafting) is None and config.speculation.num_paths > 1:
        raise ConfigError(
            f"speculation.num_paths: {config.speculation.num_paths} paths need a draft model that drafts in one pass, "
            "and drafter.model does not; leave it out"
        )
    if num_common_tokens(config) is None and vocab_size(target) != vocab_size(drafter):
        sides = ((config.target, "target"), (config.drafter, "drafter"))
        tokens = [read_vocabulary(str(_file(each, part, "tokenizer.json").parent)) for each, part in sides]
        check_vocabularies(target, drafter, (tokens[0], tokens[1]))
    if config.drafter.learn is not None:
        check_learns(config, drafter)


def check_files(section: str, directory: Path, *, has_weights: bool = True) -> None:
    """Raises ConfigError unless all weights of a checkpoint, and a target's tokenizer, are there.

    A file must be as long as its header says, which an interrupted download is not.
    """
    if section == "target" and not any(directory.glob("token*")) and not (directory / "vocab.json").is_file():
        raise ConfigError(
            f"{section}.model: {directory} holds no tokenizer; {_AGAIN}, or set {section}.engine_args.tokenizer"
        )
    if not has_weights:
        return
    weights_digest(directory, contents=False)  # reads the header of every file
    index = directory / "model.safetensors.index.json"
    names = set(_read_json(index, section).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        raise ConfigError(
            f"{section}.model: {directory}: {missing[0]} of {len(names)} weight files is missing; {_AGAIN}"
        )
    if not {file.suffix for file in directory.iterdir()} & {".safetensors", ".bin", ".pt", ".gguf"}:
        raise ConfigError(f"{section}.model: {directory}: no weights (*.safetensors); {_AGAIN}")


def text_model(document: ModelJson) -> ModelJson:
    """Returns the part of a config.json that describes the language model; multimodal checkpoints nest it."""
    nested = document.get("text_config")
    return nested if isinstance(nested, dict) else document


def check_tensor_parallel(document: ModelJson, tensor_parallel_size: int, section: str) -> None:
    """Raises ConfigError unless the attention heads split evenly over the ranks."""
    heads = text_model(document).get("num_attention_heads")
    if isinstance(heads, int) and heads % tensor_parallel_size:
        raise ConfigError(
            f"{section}.tensor_parallel_size: {tensor_parallel_size} does not divide the {heads} attention heads "
            f"(num_attention_heads) of {section}.model"
        )


def vocab_size(document: ModelJson) -> Any:
    """Returns the rows of the embeddings by config.json, padding included."""
    return text_model(document).get("vocab_size")


def check_vocabularies(
    target: ModelJson, drafter: ModelJson, tokens: tuple[Mapping[str, int] | None, Mapping[str, int] | None]
) -> None:
    """Raises ConfigError if the token ids of the two models may mean different tokens.

    Args:
        tokens: Vocabularies of target and drafter, entry -> id; None where there is none.
    """
    if tokens[0] is not None and tokens[1] is not None:
        common_tokens(tokens[0], tokens[1], (set(), set()))
    elif (ours := vocab_size(target)) != (its := vocab_size(drafter)):
        raise ConfigError(
            f"drafter.model: its vocabulary has {its} tokens, the target's has {ours} (vocab_size in config.json), "
            "and without a tokenizer.json of both nobody can tell whether that is padding; use a drafter of the same "
            "model family, and checkpoints with their tokenizers"
        )


def common_tokens(
    target: Mapping[str, int], drafter: Mapping[str, int], added: tuple[Set[int], Set[int]]
) -> int | None:
    """Returns how many of the lowest ids mean the same token on both sides; only these are drafted. None: all do.

    Checkpoints of one family differ in tokens that were added later, such as ``<think>`` or end tokens.

    Args:
        added: Ids of added tokens of target and drafter.

    Raises:
        ConfigError: Another token differs, or a text token's id is above that of an added one that differs.
    """
    token_of = [{index: token for token, index in tokens.items()} for tokens in (target, drafter)]
    differing = {i for i in token_of[0].keys() | token_of[1].keys() if token_of[0].get(i) != token_of[1].get(i)}
    if not differing:
        return None
    first = min(differing)
    is_text = [{i for i in ids if i not in more} for ids, more in zip(token_of, added, strict=True)]
    if (wrong := differing & (is_text[0] | is_text[1])) or max(is_text[0], default=0) > first:
        which = min(wrong, default=first)
        raise ConfigError(
            f"drafter.model: its tokenizer differs from the target's in {len(differing)} of {len(target)} ids, e.g. "
            f"{which} is {token_of[1].get(which)!r} and not {token_of[0].get(which)!r}, and only ids "
            "below a difference are drafted; use a drafter of the same model family"
        )
    return first


def num_common_tokens(config: OutriderConfig) -> int | None:
    """Returns common_tokens of the pair, or None if all agree or a tokenizer is not on this node."""
    if not isinstance(config.drafter, DraftModelConfig):
        return None
    models = config.target.model, config.drafter.model
    tokens = read_vocabulary(models[0]), read_vocabulary(models[1])
    if tokens[0] is None or tokens[1] is None:
        return None
    documents = [json.loads((Path(model) / "tokenizer.json").read_bytes()) for model in models]
    added = [{token["id"] for token in document.get("added_tokens", [])} for document in documents]
    return common_tokens(tokens[0], tokens[1], (added[0], added[1]))


def check_learns(config: OutriderConfig, drafter: ModelJson) -> None:
    """Raises ConfigError if the draft model cannot be trained while it serves."""
    assert isinstance(config.drafter, DraftModelConfig)
    architecture = (drafter.get("architectures") or ["none"])[0]
    problem = None
    if architecture not in SUPPORTED:
        problem = f"drafter.model is a {architecture}; {', '.join(SUPPORTED)} can be trained"
    elif (how := drafter.get("quantization_config")) is not None:
        problem = f"drafter.model's weights are quantised ({how.get('quant_method')}); leave learn out"
    elif mask_token(drafter, config.drafter.parallel_drafting) is not None:
        problem = "drafter.model drafts in one pass, which is not trained; set drafter.parallel_drafting: false"
    elif config.serving.tenant_isolation:
        problem = "serving.tenant_isolation keeps answers from all others; leave one of the two out"
    if problem is not None:
        raise ConfigError(f"drafter.learn: {problem}")


def read_model_json(engine: EngineConfig | MLPSpeculatorConfig, section: str) -> dict[str, Any]:
    """Returns the config.json of a local checkpoint, or of a hub id by download. Raises ConfigError."""
    return _read_json(_file(engine, section, "config.json"), section)


def _read_json(path: Path, section: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it holds no object")
        return document
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.model: {path} is not readable as JSON ({error}); {_AGAIN}") from None


def _file(engine: EngineConfig | MLPSpeculatorConfig, section: str, name: str) -> Path:
    """Returns the path of a checkpoint's file; a hub id's is downloaded. Raises ConfigError."""
    if Path(engine.model).is_dir():
        return Path(engine.model) / name
    try:
        return fetch_from_hub(engine.model, engine.revision, name)
    except ConfigError as error:
        raise ConfigError(
            f"{section}.model: {engine.model!r} is no local checkpoint directory, and the model hub does not give it "
            f"({error}); give a directory, or use the preset after: outrider fetch PRESET"
        ) from None
