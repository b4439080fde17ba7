"""Checks what a checkpoint's own files say against a configuration, before anything is started.

What vLLM refuses itself is left to it, but for what an operator gets wrong most often: ranks and lengths.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.actors.learning.draft_models import SUPPORTED
from outrider.cluster.adapters import AdapterError, base_shapes, check_adapter
from outrider.cluster.config import ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.drafter_config import DraftEngineConfig
from outrider.cluster.lora_config import AdapterConfig
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.models.identity import check_made_for

ModelJson = Mapping[str, Any]
"""A decoded config.json."""

_HEADS = ("eagle", "medusa", "mlp_speculator", "mlpspeculator", "dflash", "dspark")
"""Parts of the names by which checkpoints of drafting heads call themselves."""


def text_model(document: ModelJson) -> ModelJson:
    """Returns the language model's part of a config.json; multimodal checkpoints nest it."""
    nested = document.get("text_config")
    return nested if isinstance(nested, dict) else document


def check_tensor_parallel(document: ModelJson, tensor_parallel_size: int, section: str) -> None:
    """Raises ConfigError unless attention and feed-forward layers split evenly over the ranks.

    Fewer key-value heads than ranks are fine where they divide the ranks: each rank then keeps a copy of one.
    """
    model, ranks = text_model(document), tensor_parallel_size
    heads, width = model.get("num_attention_heads"), model.get("intermediate_size")
    kv_heads = model.get("num_key_value_heads") or heads
    problem = None
    if isinstance(heads, int) and heads % ranks:
        problem = f"the {heads} attention heads (num_attention_heads)"
    elif isinstance(kv_heads, int) and kv_heads % ranks and ranks % kv_heads:
        problem = f"the {kv_heads} key-value heads (num_key_value_heads)"
    elif isinstance(width, int) and width % ranks:
        problem = f"the feed-forward width {width} (intermediate_size)"
    if problem is not None:
        raise ConfigError(f"{section}.tensor_parallel_size: {ranks} does not divide {problem} of {section}.model")


def check_vocabularies(
    target: ModelJson, drafter: ModelJson, tokens: tuple[Mapping[str, int] | None, Mapping[str, int] | None]
) -> None:
    """Raises ConfigError when the two models' token ids may mean different things.

    tokens: the target's and the drafter's vocabularies, entry -> id; None where there is none to read. Sizes need not
    agree, for models of one family are padded differently, and no more is drafted than both have. But where they
    differ only the tokenizers can say that it is padding.
    """
    if tokens[0] is not None and tokens[1] is not None:
        check_same_tokens(tokens[0], tokens[1])
        return
    sizes = vocabulary_sizes(target, drafter)
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"drafter.model: its vocabulary has {sizes[1]} tokens, the target's has {sizes[0]} (vocab_size in "
            "config.json), and without a tokenizer.json of both nobody can tell whether that is padding; use a drafter "
            "of the same model family, and checkpoints with their tokenizers"
        )


def check_draft_vocab_size(
    target: ModelJson, drafter: ModelJson, draft_vocab_size: int | None, common: int | None = None
) -> None:
    """Raise ConfigError when the output head is to be cut to more tokens than both models have. common: see
    common_tokens."""
    known = [size for size in (*vocabulary_sizes(target, drafter), common) if isinstance(size, int)]
    if draft_vocab_size and known and draft_vocab_size > min(known):
        raise ConfigError(
            f"drafter.draft_vocab_size: {draft_vocab_size}, target and drafter have {min(known)} tokens in common; set "
            "fewer, or 0 for all"
        )


def vocabulary_sizes(target: ModelJson, drafter: ModelJson) -> tuple[Any, Any]:
    """Rows of the embeddings, padding included, as the documents say."""
    return text_model(target).get("vocab_size"), text_model(drafter).get("vocab_size")


def check_same_tokens(target: Mapping[str, int], drafter: Mapping[str, int]) -> None:
    """Raise ConfigError when a token (vocabulary entry -> id) differs: another tokenizer."""
    differing = [token for token, index in target.items() if drafter.get(token) != index]
    if differing or len(target) != len(drafter):
        example = f", e.g. {differing[0]!r} is {target[differing[0]]} there" if differing else ""
        raise ConfigError(
            f"drafter.model: its tokenizer differs from the target's in {max(len(differing), 1)} of {len(target)} "
            f"tokens{example}; use a drafter of the same model family"
        )


def common_tokens(
    target: Mapping[str, int], drafter: Mapping[str, int], added: tuple[Set[int], Set[int]]
) -> int | None:
    """How many of the lowest ids mean the same token on both sides, for drafts to be of these only; None: all do.

    Checkpoints of one family differ in what was added to its tokenizer later: ``<think>``, or other end tokens. added:
    the ids of such tokens, the target's and the drafter's. Raises ConfigError where another token differs, or where one
    of the text's tokens has an id above an added one that differs.
    """
    token_of = [{index: token for token, index in tokens.items()} for tokens in (target, drafter)]
    differing = {i for i in token_of[0].keys() | token_of[1].keys() if token_of[0].get(i) != token_of[1].get(i)}
    if not differing:
        return None
    if any(
        i in tokens and i not in of_side for i in differing for tokens, of_side in zip(token_of, added, strict=True)
    ):
        check_same_tokens(target, drafter)
    first = min(differing)
    lost = sum(i > first and i not in added[0] for i in token_of[0])
    if lost:
        raise ConfigError(
            f"drafter.model: its tokenizer has {token_of[1].get(first)!r} where the target's has "
            f"{token_of[0].get(first)!r} (id {first}), and only ids below one that differs are drafted: {lost} of the "
            f"text's tokens are above it; use a drafter of the same model family"
        )
    return first


def num_common_tokens(config: OutriderConfig) -> int | None:
    """See common_tokens; the fewest of all draft models. None for a pair without tokenizers here: check_models takes
    those with the same tokens only."""
    drafter = config.drafter
    if not isinstance(drafter, DraftModelConfig):
        return None
    of_each = []
    for section, engine in drafter.models.items():
        with _named(section):
            of_each.append(_common_with(config.target, engine))
    return min((common for common in of_each if common is not None), default=None)


def _common_with(target: EngineConfig, drafter: EngineConfig) -> int | None:
    """See common_tokens; of two local checkpoints with their tokenizers."""
    tokens = read_vocabulary(target.model), read_vocabulary(drafter.model)
    if tokens[0] is None or tokens[1] is None:
        return None
    return common_tokens(tokens[0], tokens[1], (_added_ids(target.model), _added_ids(drafter.model)))


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Errors about ``drafter`` are about this section, which is that one or one of its others."""
    try:
        yield
    except ConfigError as error:
        if section == "drafter":
            raise
        raise ConfigError(str(error).replace("drafter.", f"{section}.")) from None


def check_models(config: OutriderConfig) -> None:
    """Checks every checkpoint of ``config`` against it. Raises ConfigError naming the field and the fix.

    Reads config.json, and tokenizer.json where both sides have one. A hub id's config.json is downloaded. Co-located
    drafters are vLLM's to check, but for one that was trained for another target.
    """
    target = read_model_json(config.target, "target")
    check_tensor_parallel(target, config.target.tensor_parallel_size, "target")
    _check_length(target, config.target, "target")
    check_adapters(config)
    if config.drafter_model is not None and Path(config.target.model).is_dir() and Path(config.drafter_model).is_dir():
        check_made_for(Path(config.target.model), Path(config.drafter_model))
    if not isinstance(config.drafter, DraftModelConfig):
        return
    for section, engine in config.drafter.models.items():
        with _named(section):
            document = _check_draft_model(config, target, engine)
        if section == "drafter" and config.drafter.learn is not None:
            check_learns(config, document)


def _check_draft_model(config: OutriderConfig, target: ModelJson, engine: DraftEngineConfig) -> ModelJson:
    """Returns its config.json."""
    drafter = read_model_json(engine, "drafter")
    _check_is_model(drafter)
    check_tensor_parallel(drafter, engine.tensor_parallel_size, "drafter")
    _check_length(drafter, engine, "drafter")
    common = _common_with(config.target, engine)
    if common is None:
        check_vocabularies(target, drafter, _tokens(config.target, target, engine, drafter))
    check_draft_vocab_size(target, drafter, engine.draft_vocab_size, num_common_tokens(config))
    return drafter


def check_adapters(config: OutriderConfig) -> None:
    """Raise ConfigError when an adapter's files are not of the target, or of the draft model."""
    if isinstance(config.drafter, DraftModelConfig) and (own := config.drafter.lora) is not None:
        _check_adapters("drafter", own.adapters, own.max_lora_rank, config.drafter.model)
    lora = config.target.lora
    if lora is None:
        return
    _check_adapters("target", lora.adapters, lora.max_lora_rank, config.target.model)


def _check_adapters(section: str, adapters: Sequence[AdapterConfig], max_lora_rank: int, model: str) -> None:
    base = base_shapes(model) if adapters else None
    for adapter in adapters:
        try:
            check_adapter(adapter.path, max_lora_rank, base)
        except AdapterError as error:
            said = str(error).replace("target.", f"{section}.")
            raise ConfigError(f"{section}.lora.adapters: {adapter.name}: {said}") from None


def _check_is_model(drafter: ModelJson) -> None:
    names = [*(drafter.get("architectures") or ()), drafter.get("model_type"), drafter.get("speculators_model_type")]
    if any(head in str(name).lower() for name in names for head in _HEADS):
        raise ConfigError(
            f"drafter.model: it holds drafting heads ({names[0]}), and method draft_model needs a language model; "
            "heads run inside the target's engine: set drafter.placement: co_located and drafter.method"
        )


def check_learns(config: OutriderConfig, drafter: ModelJson) -> None:
    """Raise ConfigError when the draft model cannot be trained while it serves."""
    assert isinstance(config.drafter, DraftModelConfig)
    assert config.drafter.learn is not None
    architecture = (drafter.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise ConfigError(
            f"drafter.learn: drafter.model is a {architecture}; {', '.join(SUPPORTED)} can be trained; leave learn out"
        )
    if (how := drafter.get("quantization_config")) is not None:
        method = how.get("quant_method", "quantised") if isinstance(how, dict) else "quantised"
        raise ConfigError(
            f"drafter.learn: drafter.model's weights are quantised ({method}) and cannot be trained; give another "
            "checkpoint, or leave learn out"
        )
    if config.serving.tenant_isolation:
        raise ConfigError(
            "drafter.learn: serving.tenant_isolation keeps what one key's answers say from all others, and a drafter "
            "that learned from them would tell; leave one of the two out"
        )
    if (general := config.drafter.learn.general) is not None and not any(
        Path(general).expanduser().glob("batch-*.safetensors")
    ):
        raise ConfigError(
            f"drafter.learn.general: {general} holds no texts (batch-*.safetensors); give the directory texts of what "
            "`outrider distill` wrote, or leave it out"
        )
    if (directory := config.drafter.learn.directory) is not None:
        path = Path(directory).expanduser()
        if path.exists() and not (path.is_dir() and os.access(path, os.W_OK)):
            raise ConfigError(f"drafter.learn.directory: {directory} is no directory that can be written to")


def _tokens(
    target: EngineConfig, target_json: ModelJson, drafter: EngineConfig, drafter_json: ModelJson
) -> tuple[dict[str, int] | None, dict[str, int] | None]:
    """Vocabularies of both. A hub id's tokenizer is fetched where the sizes differ: it alone can say why."""
    sizes = vocabulary_sizes(target_json, drafter_json)
    places = [
        engine.model if sizes[0] == sizes[1] else _with_tokenizer(engine, section)
        for engine, section in ((target, "target"), (drafter, "drafter"))
    ]
    return read_vocabulary(places[0]), read_vocabulary(places[1])


def _with_tokenizer(engine: EngineConfig, section: str) -> str:
    if Path(engine.model).is_dir():
        return engine.model
    return str(_download(engine, section, "tokenizer.json").parent)


def _check_length(document: ModelJson, engine: EngineConfig, section: str) -> None:
    if "hf_overrides" in engine.engine_args:
        return  # vLLM checks what they come to
    model, max_model_len = text_model(document), engine.max_model_len
    limit = model.get("max_position_embeddings")
    scaled = model.get("rope_scaling") or (model.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    if max_model_len and isinstance(limit, int) and max_model_len > limit and not scaled:
        raise ConfigError(
            f"{section}.max_model_len: {max_model_len} is above the {limit} positions {section}.model was made for "
            "(max_position_embeddings); lower it"
        )


def read_model_json(engine: EngineConfig, section: str) -> dict[str, Any]:
    """Returns config.json of a local checkpoint, or of a hub id, which downloads that one file. Raises ConfigError."""
    path = Path(engine.model) / "config.json"
    if not path.is_file():
        path = _download(engine, section, "config.json")
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.model: {path} is not readable as JSON ({error}); fetch the model again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{section}.model: {path} holds no JSON object; fetch the model again")
    return document


def _download(engine: EngineConfig, section: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(engine.model, name, revision=engine.revision, etag_timeout=10))
    except Exception as error:  # noqa: BLE001 - the hub client raises errors of several HTTP libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{section}.model: {engine.model!r} is no local checkpoint directory, and the model hub does not give it "
            f"({reason}); give a directory (--{section} PATH), or use the preset after: outrider fetch PRESET"
        ) from None


def _added_ids(model: str) -> set[int]:
    """Ids of a local checkpoint's added tokens, see read_vocabulary."""
    document = json.loads((Path(model) / "tokenizer.json").read_text())
    return {added["id"] for added in document.get("added_tokens", [])}
