"""What a checkpoint's own files say against a configuration, before anything is started.

The checks are pure: they take decoded ``config.json`` documents and vocabularies. ``check_models`` reads the files.
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
from outrider.cluster.config import CoLocatedConfig, ConfigError, DraftModelConfig, EngineConfig, OutriderConfig
from outrider.cluster.drafter_config import DraftEngineConfig
from outrider.cluster.lora_config import AdapterConfig
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.models.identity import check_made_for
from outrider.deploy.models.method_guide import ModelJson, kind_of, text_model


def check_tensor_parallel(
    document: ModelJson, tensor_parallel_size: int, section: str, key: str = "tensor_parallel_size"
) -> None:
    """Raise ConfigError unless attention and feed-forward layers split evenly over the ranks.

    section: ``target`` or ``drafter``; key: of it, for the message. Fewer key-value heads than ranks are fine when they
    divide the ranks: each rank then keeps a copy of one.
    """
    model, ranks = text_model(document), tensor_parallel_size
    heads = model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads") or heads
    width = model.get("intermediate_size")
    problem = None
    if isinstance(heads, int) and heads % ranks:
        problem = f"the {heads} attention heads (num_attention_heads)"
    elif isinstance(kv_heads, int) and kv_heads % ranks and ranks % kv_heads:
        problem = f"the {kv_heads} key-value heads (num_key_value_heads)"
    elif isinstance(width, int) and width % ranks:
        problem = f"the feed-forward width {width} (intermediate_size)"
    if problem is None:
        return
    allowed = ", ".join(str(n) for n in range(1, 65) if _splits(heads, kv_heads, width, n))
    raise ConfigError(
        f"{section}.{key}: {ranks} does not divide {problem} of {section}.model; this model allows {allowed}"
    )


def _splits(heads: Any, kv_heads: Any, width: Any, ranks: int) -> bool:
    even = all(not isinstance(size, int) or size % ranks == 0 for size in (heads, width))
    return even and (not isinstance(kv_heads, int) or kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_pipeline(document: ModelJson, pipeline_parallel_size: int) -> None:
    """Raise ConfigError where a pipeline stage of the target would have no layer."""
    layers = text_model(document).get("num_hidden_layers")
    if isinstance(layers, int) and layers < pipeline_parallel_size:
        raise ConfigError(
            f"target.pipeline_parallel_size: {pipeline_parallel_size} stages, and the {layers} layers "
            f"(num_hidden_layers) of target.model are too few for one each; set {layers} or fewer"
        )


def check_vocabularies(
    target: ModelJson, drafter: ModelJson, tokens: tuple[Mapping[str, int] | None, Mapping[str, int] | None]
) -> None:
    """Raise ConfigError when the two models' token ids may mean different things.

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


def check_same_size(target: ModelJson, drafter: ModelJson) -> None:
    """Raise ConfigError when the vocabularies' sizes differ, which vLLM's own draft_model refuses."""
    sizes = vocabulary_sizes(target, drafter)
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"drafter.model: its vocabulary has {sizes[1]} tokens, the target's has {sizes[0]} (vocab_size in "
            "config.json), which co-located drafting refuses; leave placement: co_located out if only the padding "
            "differs, or use a drafter made for this target's tokenizer"
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
    """Check every checkpoint of ``config`` against it. Reads config.json, and tokenizer.json where both sides have one;
    the target's tensors where a drafter says for which ones it was trained and nobody has read them before.

    Raises ConfigError naming the field and the fix; a hub id whose config.json cannot be had is one of these.
    """
    target = read_model_json(config.target, "target")
    check_tensor_parallel(target, config.target.tensor_parallel_size, "target")
    check_pipeline(target, config.target.pipeline_parallel_size)
    _check_length(target, config.target.max_model_len, "target")
    check_adapters(config)
    if config.co_located is not None:
        _check_co_located(config, config.co_located, target)
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
    check_drafts(drafter, "draft_model")
    check_tensor_parallel(drafter, engine.tensor_parallel_size, "drafter")
    _check_length(drafter, engine.max_model_len, "drafter")
    common = _common_with(config.target, engine)
    if common is None:
        check_vocabularies(target, drafter, _tokens(config.target, target, engine, drafter))
    check_draft_vocab_size(target, drafter, engine.draft_vocab_size, num_common_tokens(config))
    _check_made_for(config.target, engine.model)
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


def check_drafts(drafter: ModelJson, method: str) -> None:
    """Raise ConfigError when the checkpoint is not what the method drafts with."""
    kind = kind_of(drafter).kind
    wanted = "model" if method in ("draft_model", "mtp") else method
    if kind == wanted:
        return
    holds = "a language model" if kind == "model" else f"{kind} heads"
    needs = "a language model" if wanted == "model" else f"{wanted} heads"
    if kind == "model" and wanted in ("eagle", "eagle3"):
        return  # heads that call themselves after the model they imitate: vLLM renames them
    raise ConfigError(
        f"drafter.model: it holds {holds}, and method {method} drafts with {needs}; set drafter.method: "
        f"{'draft_model' if kind == 'model' else kind}, or give another checkpoint"
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


def check_heads(target: ModelJson, heads: ModelJson) -> None:
    """Raise ConfigError when the heads were made for a target of another width."""
    size, made_for = kind_of(target).hidden_size, kind_of(heads).target_hidden_size
    if size and made_for and size != made_for:
        raise ConfigError(
            f"drafter.model: heads for a hidden size of {made_for}, the target's is {size} (hidden_size in "
            "config.json); use heads that were trained for this target"
        )


def check_mtp(target: ModelJson) -> None:
    """Raise ConfigError when the target has no layers that predict further tokens, or vLLM does not draft with them."""
    kind = kind_of(target)
    if not kind.mtp_layers:
        raise ConfigError(
            "drafter.method: mtp, but target.model's config.json names no layers that predict further tokens "
            "(num_nextn_predict_layers); see which methods fit: outrider methods MODEL"
        )
    if not kind.mtp_family:
        raise ConfigError(
            f"drafter.method: mtp, but vLLM does not draft with the extra layers of {kind.architecture}; see which "
            "methods fit: outrider methods MODEL"
        )


def _check_co_located(config: OutriderConfig, drafter: CoLocatedConfig, target: ModelJson) -> None:
    if drafter.method == "mtp" and drafter.model is None:
        check_mtp(target)
    if drafter.model is None:
        return
    engine = EngineConfig(model=drafter.model, revision=drafter.revision)
    document = read_model_json(engine, "drafter")
    check_drafts(document, drafter.method)
    if drafter.method != "draft_model":
        if drafter.method != "mtp":
            check_heads(target, document)
        return
    ranks = drafter.draft_tensor_parallel_size or config.target.tensor_parallel_size
    check_tensor_parallel(document, ranks, "drafter", key="draft_tensor_parallel_size")
    if not drafter.use_heterogeneous_vocab:
        check_same_size(target, document)
        check_vocabularies(target, document, (read_vocabulary(config.target.model), read_vocabulary(drafter.model)))
    _check_made_for(config.target, drafter.model)


def _check_made_for(target: EngineConfig, drafter: str) -> None:
    """See identity.check_made_for; of a drafter in a directory, and a target whose weights are on this machine."""
    made_by_us = Path(drafter)
    if made_by_us.is_dir() and (place := _here(target)) is not None:
        check_made_for(place, made_by_us)


def _here(engine: EngineConfig) -> Path | None:
    """Where its weights are, all of them: its directory, or the hub client's copy."""
    if (path := Path(engine.model)).is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(engine.model, "config.json", revision=engine.revision)
    if not isinstance(found, str):
        return None
    index = Path(found).with_name("model.safetensors.index.json")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        names = {"model.safetensors"}
    return index.parent if all((index.parent / name).is_file() for name in names) else None


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


def _check_length(document: ModelJson, max_model_len: int | None, section: str) -> None:
    model = text_model(document)
    limit = model.get("max_position_embeddings")
    scaled = model.get("rope_scaling") or (model.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    if max_model_len and isinstance(limit, int) and max_model_len > limit and not scaled:
        raise ConfigError(
            f"{section}.max_model_len: {max_model_len} is above the {limit} positions {section}.model was made for "
            "(max_position_embeddings); lower it"
        )


def read_model_json(engine: EngineConfig, section: str) -> dict[str, Any]:
    """config.json of a local checkpoint, or of a hub id (which downloads that one file), as vLLM will read it: with
    ``engine_args.hf_overrides``."""
    path = Path(engine.model) / "config.json"
    if not path.is_file():
        path = _download(engine, section, "config.json")
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.model: {path} is not readable as JSON ({error}); fetch the model again") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{section}.model: {path} holds no JSON object; fetch the model again")
    return _overridden(document, engine.engine_args.get("hf_overrides") or {})


def _overridden(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM does it: of a model's configuration inside the model's the keys that are named change, anything else is
    put in the place of what is there."""
    changed = dict(document)
    for key, value in overrides.items():
        inner = changed.get(key)
        is_model = key.endswith("_config") and key != "quantization_config"
        if is_model and isinstance(inner, dict) and isinstance(value, Mapping):
            value = _overridden(inner, value)
        changed[key] = value
    return changed


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
