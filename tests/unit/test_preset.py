"""Tests the way from names and options to a configuration, and what a checkpoint's own files rule out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError, DraftModelConfig, GatewayConfig, parse_config
from outrider.deploy import app
from outrider.deploy.app import build_app, plan_replica
from outrider.deploy.models.check import (
    check_models,
    check_tensor_parallel,
    common_tokens,
    num_common_tokens,
)
from outrider.deploy.models.store import (
    FETCHED_WHEN_MISSING,
    PRESET_MODELS,
    models_dir,
    write_manifest,
)
from outrider.deploy.preset import Overrides, preset_names, resolve_config

pytestmark = pytest.mark.usefixtures("outrider_home")

LLAMA = {"num_attention_heads": 8, "vocab_size": 100}


def checkpoint(path: Path, vocab: dict[str, int] | None = None, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if vocab is not None:
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    return path


def fetched(name: str) -> Path:
    path = checkpoint(models_dir() / name)
    write_manifest(path, {"model": name})
    return path


def test_presets_are_the_documented_ones_and_valid() -> None:
    assert preset_names() == [
        "gpt-oss-120b", "llama-70b", "llama-70b-pool", "llama-70b-pool-1b", "qwen-coder", "qwen3-32b", "qwen3-32b-pool",
        "smollm2",
    ]  # fmt: skip
    assert set(PRESET_MODELS) == {"qwen-coder", "smollm2"}, "no package carries larger models"
    assert set(preset_names()) >= FETCHED_WHEN_MISSING
    for name in preset_names():
        config = resolve_config(name)
        assert config.num_speculative_tokens == (8 if name == "llama-70b-pool-1b" else 4)
        assert config.link.link_deadline_ms > config.link.round_deadline_ms


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_planned_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    config = resolve_config(name)
    assert plan_replica(config).total("GPU", 1, 0) >= config.target.num_ranks


def test_a_preset_uses_the_copies_that_are_fetched() -> None:
    target = fetched("Qwen2.5-Coder-1.5B-Instruct")
    config = resolve_config("qwen-coder")
    assert config.target.model == str(target)
    assert isinstance(config.drafter, DraftModelConfig)
    assert config.drafter.model == "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def test_a_file_keeps_its_hub_id_even_when_a_copy_is_fetched(tmp_path: Path) -> None:
    fetched("SmolLM2-135M-Instruct")
    file = tmp_path / "mine.yaml"
    file.write_text("target: {model: HuggingFaceTB/SmolLM2-135M-Instruct}")
    assert resolve_config(str(file)).target.model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_overrides_reach_their_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "t")
    checkpoint(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    config = resolve_config("qwen-coder", Overrides("./t", "d", "float32", grpc_port=0, http_port=1234))
    assert isinstance(config.drafter, DraftModelConfig)
    assert config.target.model == str(tmp_path / "t"), "Ray's workers run in another directory"
    assert config.drafter.model == str(tmp_path / "d")
    assert (config.target.dtype, config.drafter.dtype) == ("float32", "float32")
    assert isinstance(config.serving.gateway, GatewayConfig)
    assert (config.serving.gateway.grpc_port, config.serving.gateway.http_port) == (0, 1234)
    assert config.served_model_name == "t"


def test_dtype_leaves_an_ngram_drafter_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"target: {{model: {checkpoint(tmp_path / 't')}}}\ndrafter: {{method: ngram}}")
    assert resolve_config(str(file), Overrides(dtype="float32")).target.dtype == "float32"
    with pytest.raises(ConfigError, match="drafter: --drafter names a draft model, and the drafter section has none"):
        resolve_config(str(file), Overrides(drafter="/x"))


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.model: .* holds no config\.json"):
        resolve_config("smollm2", Overrides(target=str(tmp_path)))
    file = tmp_path / "weights.gguf"
    file.touch()
    with pytest.raises(ConfigError, match=r"target\.model: .* is a file"):
        resolve_config("smollm2", Overrides(target=str(file)))


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (LLAMA, 3, r"target\.tensor_parallel_size: 3 does not divide the 8 attention heads"),
        ({"text_config": LLAMA}, 3, "the 8 attention heads"),
    ],
)
def test_tensor_parallel_that_does_not_split_is_refused(config: dict[str, object], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(config, ranks, "target")


TOKENS = {"a": 0, "b": 1}


@pytest.mark.parametrize("tokens", [(None, None), (TOKENS, None), (None, TOKENS)])
def test_sizes_that_differ_without_tokenizers_to_compare_are_refused(tokens: tuple, tmp_path: Path) -> None:
    target = {"model": str(checkpoint(tmp_path / "target", tokens[0]))}
    drafter = str(checkpoint(tmp_path / "drafter", tokens[1], vocab_size=99))
    message = r"drafter\.model: its vocabulary has 99 tokens, the target's has 100.*without a tokenizer\.json of both"
    with pytest.raises(ConfigError, match=message):
        check_models(parse_config({"target": target, "drafter": {"method": "draft_model", "model": drafter}}))


TEXT = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("target", "drafter", "common"),
    [
        ({"<end>": 3}, {"<end>": 3}, None),
        ({"<end>": 3}, {"<eos>": 3}, 3),
        ({"<end>": 3}, {"<end>": 3, "<think>": 4}, 4),
        ({"<end>": 3, "<think>": 4}, {"<end>": 3}, 4),
        ({"<end>": 3, "<think>": 4, "<x>": 5}, {"<end>": 3, "<x>": 4, "<think>": 5}, 4),
        ({"<end>": 3, "<think>": 4, "<x>": 5}, {"<end>": 3, "<y>": 4, "<x>": 5}, 4),
    ],
)
def test_added_tokens_may_differ(target: dict[str, int], drafter: dict[str, int], common: int | None) -> None:
    """Only ids below the first that differs are drafted: what means one token here and another there never is."""
    added = set(target.values()), set(drafter.values())
    assert common_tokens(TEXT | target, TEXT | drafter, added) == common


@pytest.mark.parametrize(
    ("target", "drafter", "added", "message"),
    [
        (
            TEXT,
            {"a": 0, "b": 2, "c": 1},
            (set(), set()),
            r"differs from the target's in 2 of 3 ids, e\.g\. 1 is 'c' and not 'b'",
        ),
        (TEXT, TEXT | {"d": 3}, (set(), set()), "tokenizer differs"),
        (TEXT | {"d": 3}, TEXT | {"<end>": 3}, (set(), {3}), "tokenizer differs"),
        (
            {"<s>": 0, "a": 1, "b": 2},
            {"<bos>": 0, "a": 1, "b": 2},
            ({0}, {0}),
            r"differs from the target's in 1 of 3 ids, e\.g\. 0 is '<bos>' and not '<s>'",
        ),
    ],
)
def test_tokenizers_whose_texts_tokens_differ_are_refused(
    target: dict[str, int], drafter: dict[str, int], added: tuple[set[int], set[int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        common_tokens(target, drafter, added)


def test_a_draft_model_with_other_added_tokens_is_taken_and_what_is_common_is_handed_on(tmp_path: Path) -> None:
    def with_added(name: str, **added: int) -> str:
        path = checkpoint(tmp_path / name, vocab=TEXT)
        listed = [{"content": token, "id": index} for token, index in added.items()]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": TEXT}, "added_tokens": listed}))
        return str(path)

    target, drafter = with_added("t", end=3, think=4), with_added("d", end=3, other=4)
    section = {"method": "draft_model", "model": drafter}
    config = parse_config({"target": {"model": target}, "drafter": section})
    check_models(config)
    assert num_common_tokens(config) == 4
    for same in ({**section, "model": target}, {"method": "ngram"}):
        assert num_common_tokens(parse_config({"target": {"model": target}, "drafter": same})) is None
    ingress = build_app(config, plan_replica(config))._bound_deployment
    (replica,) = (arg._bound_deployment for arg in ingress.init_args if hasattr(arg, "_bound_deployment"))
    assert replica.init_args[3] == 4
