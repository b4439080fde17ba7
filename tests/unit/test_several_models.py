"""``drafter.also``: what is refused, and that whatever is done for a draft model is done for every one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.device_defaults import choices, with_device_defaults
from outrider.cluster.drafter_config import check_several_models
from outrider.deploy.app import describe
from outrider.deploy.models.check import check_models, num_common_tokens
from outrider.deploy.preset import Overrides, resolve_config

pytestmark = pytest.mark.usefixtures("outrider_home")

LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 100}
SMALL = {"name": "small", "model": "s"}


def drafter(*also: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": "d", "also": list(also), **keys}


def parsed(*also: dict[str, Any], target: str = "t", **keys: Any) -> OutriderConfig:
    return parse_config({"target": {"model": target}, "drafter": drafter(*also, **keys)})


def checkpoint(path: Path, *added: str, vocab: dict[str, int] | None = None, **config: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    vocab = {"a": 0, "b": 1} if vocab is None else vocab
    listed = [{"content": token, "id": len(vocab) + number} for number, token in enumerate(added)]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": listed}))
    return str(path)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (drafter(SMALL, SMALL), "also: small, small: two models have one name; give each its own"),
        (drafter({**SMALL, "name": "ngram"}), "name: 'ngram' is a method"),
        (drafter({**SMALL, "name": "draft_model"}), "name: 'draft_model' is a method"),
        (drafter({**SMALL, "name": "A b"}), r"also\[?.?0\]?\.name"),
        (drafter({"name": "small"}), r"model: required"),
        (drafter(*({**SMALL, "name": name} for name in "abc")), "also"),
        (drafter({**SMALL, "tensor_parallel_size": 2}), r"tensor_parallel_size \(2\): several draft models share one"),
        (drafter({**SMALL, "cores": [[0]]}), "cores: the models of a drafter share its cores; write drafter.cores"),
        (drafter({**SMALL, "learn": {}}), "learn"),
        (drafter(SMALL, tensor_parallel_size=2), r"tensor_parallel_size \(2\): draft models of several ranks stand al"),
        (drafter(SMALL, lora={"adapters": [{"name": "a", "path": "/a"}]}), "lora: the models in also would draft"),
        (drafter({**SMALL, "max_num_batched_tokens": 8}), r"max_num_batched_tokens \(8\) must be 64 at least"),
        (drafter({**SMALL, "draft_vocab_size": 4}), r"drafter\.also\.small\.draft_vocab_size \(4\) is below"),
    ],
)
def test_what_cannot_work_is_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"target": {"model": "t"}, "drafter": section})


def test_models_that_share_a_gpu_say_how_much_of_it_they_take() -> None:
    shares = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.4}
    for also, own, problem in (
        ({}, shares, r"drafter\.also\.small\.kv_cache_memory_bytes: required"),
        (shares, {}, r"drafter\.kv_cache_memory_bytes: required"),
        (shares, {**shares, "gpu_memory_utilization": 0.7}, r"drafter\.gpu_memory_utilization: 1\.10 over all models"),
    ):
        config = parsed({**SMALL, **also}, **own)
        check_several_models(config.drafter, gpu=False)
        with pytest.raises(ConfigError, match=problem):
            check_several_models(config.drafter, gpu=True)
    check_several_models(parsed({**SMALL, **shares}, **shares).drafter, gpu=True)
    check_several_models(parsed().drafter, gpu=True)


def test_the_device_chooses_for_each() -> None:
    config = parsed(SMALL, {"name": "other", "model": "o", "max_num_seqs": 3})
    fields = {choice.field for choice in choices(config, gpu=True)}
    assert {"drafter.also.small.max_num_seqs", "drafter.also.other.draft_vocab_size"} <= fields
    small, other = with_device_defaults(config, gpu=True).drafter.also
    assert (small.max_num_seqs, small.prefill_chunk_tokens, small.draft_vocab_size) == (128, 1024, 0)
    assert (other.max_num_seqs, other.prefill_chunk_tokens) == (3, 1024)
    assert with_device_defaults(config, gpu=False) == config


def test_the_operator_is_told_of_all() -> None:
    assert describe(parsed(SMALL)).endswith("drafted for by d (tensor parallel 1), small: s")


def test_checkpoints_are_found_and_given_a_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("t", "d", "s"):
        checkpoint(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "several.yaml"
    file.write_text(
        json.dumps({"target": {"model": "./t"}, "drafter": drafter({**SMALL, "model": "./s"}, model="./d")})
    )
    config = resolve_config(str(file), Overrides(dtype="float32"))
    assert [engine.model for engine in config.drafter.models.values()] == [str(tmp_path / "d"), str(tmp_path / "s")]
    assert {engine.dtype for engine in config.drafter.models.values()} == {"float32"}
    file.write_text(file.read_text().replace("./s", "./none"))
    with pytest.raises(ConfigError, match=r"drafter\.also\.small\.model: \./none does not exist"):
        resolve_config(str(file))


def test_each_is_checked_against_the_target(tmp_path: Path) -> None:
    target, own = checkpoint(tmp_path / "t", "end", "think"), checkpoint(tmp_path / "d", "end", "think")

    def with_small(path: str, **keys: Any) -> OutriderConfig:
        return parsed({**SMALL, "model": path, **keys}, target=target, model=own)

    check_models(with_small(own))
    assert num_common_tokens(with_small(own)) is None
    fewer = with_small(checkpoint(tmp_path / "fewer", "end", "other"))
    check_models(fewer)
    assert num_common_tokens(fewer) == 3, "what all have in common"
    stranger = checkpoint(tmp_path / "stranger", vocab={"a": 1, "b": 0})
    with pytest.raises(ConfigError, match=r"^drafter\.also\.small\.model: its tokenizer"):
        check_models(with_small(stranger))
    heads = checkpoint(tmp_path / "heads", "end", "think", architectures=["EagleLlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"^drafter\.also\.small\.model: it holds drafting heads"):
        check_models(with_small(heads))
    short = checkpoint(tmp_path / "short", "end", "think", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"^drafter\.also\.small\.max_model_len: 128 is above the 64 positions"):
        check_models(with_small(short, max_model_len=128))
