"""Checks the table of parsers against the installed vLLM and templates, and the choice for a checkpoint."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from outrider.actors.vllm_adapter.answer_parsers import (
    REASONING_FAMILIES,
    TOOL_CALL_FAMILIES,
    Parsers,
    answer_parsers,
    parsers_of_family,
)
from outrider.actors.vllm_adapter.engine_args import target_vllm_config
from outrider.cluster.config import OutriderConfig, parse_config
from outrider.cluster.placement import RankPlacement
from tests.support.models.tiny_models import build_tiny_llama

TOOLS = "{%- if tools %}{{ tools | tojson }}"
TAGGED = (
    TOOLS + '{{ "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}'
)
LLAMA = '<|start_header_id|>{{ \'{"name": function name, "parameters": dictionary\' }}'
R1 = "{{'<｜Assistant｜><think>\\n'}}"
THINKS = "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}</think>"


def test_every_name_is_one_of_vllms():
    assert {family.parser for family in TOOL_CALL_FAMILIES} <= set(ToolParserManager.list_registered())
    assert {family.parser for family in REASONING_FAMILIES} <= set(ReasoningParserManager.list_registered())


@pytest.mark.parametrize(
    ("model_type", "template", "tool_call", "reasoning"),
    [
        pytest.param("qwen2", TAGGED, "hermes", None, id="Qwen2.5"),
        pytest.param("qwen2", TAGGED + "{{ '<|im_start|>assistant\\n<think>\\n' }}", "hermes", "deepseek_r1", id="QwQ"),
        pytest.param("qwen3", TAGGED + THINKS, "hermes", "qwen3", id="Qwen3"),
        pytest.param("qwen3_moe", TAGGED, "hermes", None, id="Qwen3-Instruct"),
        pytest.param("qwen3", TAGGED + "<|im_start|>assistant\n<think>\n", "hermes", "qwen3", id="Qwen3-Thinking"),
        pytest.param(
            "qwen3_moe", TOOLS + "<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder", None, id="Qwen3-Coder"
        ),
        pytest.param("qwen3_moe", TAGGED + "<function=name><parameter=a>", None, None, id="two ways in one template"),
        pytest.param("llama", TOOLS + LLAMA, "llama3_json", None, id="Llama 3"),
        pytest.param("llama", TAGGED, "hermes", None, id="Hermes 3"),
        pytest.param("llama", R1, None, "deepseek_r1", id="R1 distillation, no tools"),
        pytest.param("llama4", TOOLS + LLAMA, "llama4_json", None, id="Llama 4, JSON"),
        pytest.param("llama4", TOOLS + "[func_name1(a=b)]", "llama4_pythonic", None, id="Llama 4, Python"),
        pytest.param("mistral", TOOLS + "[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None, id="Mistral"),
        pytest.param("gpt_oss", TOOLS + "<|channel|>analysis", "openai", "openai_gptoss", id="gpt-oss"),
        pytest.param(
            "glm4_moe",
            TOOLS + "<tool_call>{f}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>"
            "{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}",
            "glm45",
            "glm45",
            id="GLM-4.5",
        ),
        pytest.param("granite", TOOLS + "<|tool_call|>{{ thinking }}", "granite", None, id="Granite 3"),
        pytest.param("granitemoehybrid", TAGGED, "granite4", None, id="Granite 4"),
        pytest.param(
            "deepseek_v3",
            TOOLS + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json" + R1,
            "deepseek_v3",
            "deepseek_r1",
            id="R1",
        ),
        pytest.param("deepseek_v3", R1 + "{%- if not thinking -%}</think>", None, None, id="thinks when asked to"),
        pytest.param(
            "deepseek_v3",
            TOOLS + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>",
            "deepseek_v31",
            None,
            id="V3.1",
        ),
        pytest.param("gemma", TAGGED + THINKS + R1, None, None, id="another model with such a template"),
        pytest.param("llama", "{% for message in messages %}{{ message.content }}", None, None, id="plain"),
        pytest.param("qwen2", TAGGED.removeprefix(TOOLS), None, None, id="a template that does not read tools"),
        pytest.param(
            "qwen2", TAGGED.replace(TOOLS, "{% if message.tool_calls %}"), None, None, id="only calls made before"
        ),
        pytest.param("qwen2", None, None, None, id="no template"),
    ],
)
def test_the_family_decides(model_type, template, tool_call, reasoning):
    assert parsers_of_family({model_type}, template) == Parsers(tool_call, reasoning)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a tiny Llama whose tokenizer has R1's marks, and none of Llama's own."""
    path = build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added += [{**added[0], "id": 257 + at, "content": mark} for at, mark in enumerate(("<think>", "</think>"))]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(path)


def configuration(checkpoint: str, template: str | None = None, **openai: Any) -> OutriderConfig:
    given = {"chat_template": template} if template else {}
    return parse_config({"target": {"model": checkpoint, "dtype": "float32"}, "openai": {**given, **openai}})


def parsers(config: OutriderConfig) -> Parsers:
    return answer_parsers(config, ModelConfig(model=config.target.model, dtype="float32"))


def test_by_the_template_that_the_configuration_names(checkpoint):
    assert parsers(configuration(checkpoint)) == Parsers()
    assert parsers(configuration(checkpoint, TAGGED + "{% endif %}" + R1)) == Parsers("hermes", "deepseek_r1")


def test_a_name_overrides_and_null_switches_off(checkpoint):
    template = TAGGED + "{% endif %}" + R1
    named = configuration(checkpoint, template, tool_call_parser="pythonic", reasoning_parser=None)
    assert parsers(named) == Parsers("pythonic", None)
    half = configuration(checkpoint, template, tool_call_parser=None)
    assert parsers(half) == Parsers(None, "deepseek_r1")


def test_a_parser_that_misses_its_tokens_is_not_chosen(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "ray.serve.outrider.openai"):
        assert parsers(configuration(checkpoint, TOOLS + "{% endif %}" + LLAMA)) == Parsers()
    assert "llama3_json fits the model's family, but not its tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("reasoning_parser", "engine_has"),
    [("auto", "deepseek_r1"), (None, ""), ("qwen3", "qwen3")],
)
def test_grammars_hold_for_the_answer_of_the_same_parser(checkpoint, reasoning_parser, engine_has):
    config = configuration(checkpoint, R1, reasoning_parser=reasoning_parser)
    made = target_vllm_config(config, RankPlacement("local", ["Verifier:test"], [0], None, {}), None)
    assert made.structured_outputs_config.reasoning_parser == engine_has
