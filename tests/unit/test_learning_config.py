"""``drafter.learn``: what is taken, and what cannot be trained, by field and reason, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig, parse_config
from outrider.deploy.models.check import check_learns

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}


def learning(serving: dict[str, Any] | None = None, **learn: Any) -> OutriderConfig:
    drafter = {"method": "draft_model", "model": "d", "learn": learn}
    return parse_config({"target": {"model": "t"}, "drafter": drafter, "serving": serving or {}})


def test_it_is_off_unless_asked_for_and_an_empty_section_is_enough() -> None:
    plain = parse_config({"target": {"model": "t"}, "drafter": {"method": "draft_model", "model": "d"}})
    assert isinstance(plain.drafter, DraftModelConfig)
    assert plain.drafter.learn is None
    asked = learning().drafter
    assert isinstance(asked, DraftModelConfig)
    assert asked.learn is not None
    assert asked.learn.directory is None, "in memory only"
    assert asked.learn.when == "always"


@pytest.mark.parametrize(
    ("learn", "named"),
    [
        ({"share": 0}, "drafter.learn.share"),
        ({"learning_rate": -1}, "drafter.learn.learning_rate"),
        ({"max_text_tokens": 100}, "drafter.learn.max_text_tokens"),
        ({"held_out": 0.9}, "drafter.learn.held_out"),
        ({"when": "never"}, "drafter.learn.when"),
        ({"cores": []}, "drafter.learn.cores"),
        ({"cores": [1], "num_gpus": 1}, "cores: the trainer has a GPU"),
        ({"rate": 1}, "drafter.learn.rate"),
    ],
)
def test_wrong_values_are_named(learn: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        learning(**learn)


def test_quantised_weights_and_drafters_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="learn: weights quantised as fp8"):
        parse_config(
            {
                "target": {"model": "t"},
                "drafter": {"method": "draft_model", "model": "d", "quantization": "fp8", "learn": {}},
            }
        )
    with pytest.raises(ConfigError, match="learn"):
        parse_config({"target": {"model": "t"}, "drafter": {"method": "ngram", "learn": {}}})


def test_adapters_of_the_drafter_s_own_are_not_trained() -> None:
    lora = {"adapters": [{"name": "poet", "path": "p"}]}
    drafter = {"method": "draft_model", "model": "d", "learn": {}, "lora": lora}
    with pytest.raises(ConfigError, match="learn: a drafter with adapters of its own"):
        parse_config({"target": {"model": "t", "lora": lora}, "drafter": drafter})


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "is a MixtralForCausalLM; LlamaForCausalLM"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    ],
)
def test_what_cannot_be_trained_is_refused(document: dict[str, Any], problem: str) -> None:
    check_learns(learning(), LLAMA)
    with pytest.raises(ConfigError, match=rf"drafter\.learn: .*{problem}"):
        check_learns(learning(), document)


def test_tenants_are_not_learned_from() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.learn: serving\.tenant_isolation"):
        check_learns(learning({"tenant_isolation": True}), LLAMA)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    check_learns(learning(directory=str(tmp_path / "new")), LLAMA)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"drafter\.learn\.directory"):
        check_learns(learning(directory=str(tmp_path / "file")), LLAMA)
