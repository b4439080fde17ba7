"""``drafter.learn``: what is taken, and what cannot be trained, by field and reason, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.deploy.models.check import check_learns

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}


def learning(serving: dict[str, Any] | None = None, **learn: Any) -> OutriderConfig:
    drafter = {"method": "draft_model", "model": "d", "learn": learn}
    return parse_config({"target": {"model": "t"}, "drafter": drafter, "serving": serving or {}})


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "is a MixtralForCausalLM; LlamaForCausalLM"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({**LLAMA, "pard_token": 7}, "drafts in one pass"),
    ],
)
def test_what_cannot_be_trained_is_refused(document: dict[str, Any], problem: str) -> None:
    check_learns(learning(), LLAMA)
    with pytest.raises(ConfigError, match=rf"drafter\.learn: .*{problem}"):
        check_learns(learning(), document)


def test_tenants_are_not_learned_from() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.learn: serving\.tenant_isolation"):
        check_learns(learning({"tenant_isolation": True}), LLAMA)
