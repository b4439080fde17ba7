"""Chooses vLLM's parsers for tool calls and reasoning: those of the configuration, or those of the model's family.

A family is known by the model's type and by the text its chat template has, since one type is many models:
``qwen3_moe`` is Qwen3, whose calls are JSON, and Qwen3-Coder, whose calls are XML. Parser names are vLLM's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import ModelConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from outrider.actors.vllm_adapter.prompts import configured_chat_template
from outrider.cluster.config import OutriderConfig

logger = logging.getLogger("ray.serve.outrider.openai")

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names the parsers of a deployment.

    Without a tool parser, requests with tools are refused; without a reasoning parser, reasoning stays in the answer.
    """

    tool_call: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Describes the models that a parser reads."""

    models: str
    """Their names, for readers of this table."""

    parser: str
    model_types: frozenset[str]
    """Values of ``model_type`` in config.json, one of which must match."""

    marks: tuple[str, ...]
    """Texts that the chat template must have, all of them."""

    never: tuple[str, ...] = ()
    """Texts that it must not have, since they are those of a similar family."""


_QWEN = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe")
_THINKING_QWEN = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GLM = frozenset({"glm4_moe", "glm4_moe_lite", "glm4v_moe"})
_TAGGED_JSON = ("<tool_call>", "<function-name>", "<args-")
_LLAMA_JSON = '{"name": function name, "parameters"'

TOOL_CALL_FAMILIES = (
    Family("Qwen2.5, QwQ, Qwen3", "hermes", frozenset(_QWEN), _TAGGED_JSON),
    Family("Hermes 2 Pro and 3", "hermes", frozenset({"llama", "mistral"}), _TAGGED_JSON),
    Family(
        "Qwen3-Coder, Qwen3.5",
        "qwen3_coder",
        frozenset({"qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"}),
        ("<tool_call>", "<function=", "<parameter="),
    ),
    Family("Llama 3.1 to 3.3", "llama3_json", frozenset({"llama", "mllama"}), ("<|start_header_id|>", _LLAMA_JSON)),
    Family("Llama 4, told to write JSON", "llama4_json", frozenset({"llama4"}), (_LLAMA_JSON,)),
    Family("Llama 4, told to write Python", "llama4_pythonic", frozenset({"llama4"}), ("[func_name1(",)),
    Family(
        "Mistral and Mixtral with tools",
        "mistral",
        frozenset({"mistral", "mistral3", "mixtral"}),
        ("[AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    ),
    Family("gpt-oss", "openai", frozenset({"gpt_oss"}), ("<|channel|>",)),
    Family("GLM-4.5 to 4.7", "glm45", _GLM, ("<tool_call>", "<arg_key>", "<arg_value>")),
    Family("Granite 3", "granite", frozenset({"granite", "granitemoe"}), ("<|tool_call|>",)),
    Family("Granite 4", "granite4", frozenset({"granite", "granitemoehybrid"}), _TAGGED_JSON),
    Family(
        "DeepSeek V3 and R1, with a template that has tools",
        "deepseek_v3",
        frozenset({"deepseek_v3"}),
        ("<｜tool▁calls▁begin｜>", "function<｜tool▁sep｜>", "```json"),
    ),
    Family(
        "DeepSeek V3.1, with a template that has tools",
        "deepseek_v31",
        frozenset({"deepseek_v3"}),
        ("<｜tool▁calls▁begin｜>", "tool_call_name<｜tool▁sep｜>"),
    ),
)

REASONING_FAMILIES = (
    Family("Qwen3 and Qwen3.5 that think unless told not to", "qwen3", frozenset(_THINKING_QWEN), (
        "</think>", "enable_thinking is false",
    )),
    Family("Qwen3-Thinking", "qwen3", frozenset(_THINKING_QWEN), (r"<|im_start|>assistant\n<think>",)),
    Family("QwQ", "deepseek_r1", frozenset({"qwen2"}), (r"<|im_start|>assistant\n<think>",)),
    Family(
        "DeepSeek R1 and its distillations",
        "deepseek_r1",
        frozenset({"deepseek_v3", "llama", "qwen2", "qwen3"}),
        ("<｜Assistant｜><think>",),
        never=("not thinking",),
    ),
    Family("gpt-oss", "openai_gptoss", frozenset({"gpt_oss"}), ("<|channel|>",)),
    Family("GLM-4.5 to 4.7", "glm45", _GLM, ("</think>", "enable_thinking is defined and not enable_thinking")),
)  # fmt: skip
"""Models that reason by default. Granite and DeepSeek V3.1 reason on request, and a parser that waits for the end of
reasoning would take an answer without any for reasoning."""

_READS_TOOLS = re.compile(r"\{%[-+]?\s*(?:if|elif|for|set)\b[^%]*\btools\b")


def answer_parsers(config: OutriderConfig, model_config: ModelConfig) -> Parsers:
    """Returns the parsers of a deployment. A name in the configuration is taken as it is, and vLLM checks it.

    Raises ConfigError for a chat template that cannot be read.
    """
    named = config.openai
    if AUTO not in (named.tool_call_parser, named.reasoning_parser):
        return Parsers(named.tool_call_parser, named.reasoning_parser)
    tokenizer = cached_tokenizer_from_config(model_config)
    of_family = parsers_of_family(_model_types(model_config), _chat_template(config, model_config, tokenizer))
    tool_call, reasoning = named.tool_call_parser, named.reasoning_parser
    if tool_call == AUTO:
        made_by: Callable[[str], Any] = ToolParserManager.get_tool_parser
        tool_call = _usable("tool_call_parser", of_family.tool_call, made_by, tokenizer)
    if reasoning == AUTO:
        reasoning = _usable(
            "reasoning_parser", of_family.reasoning, ReasoningParserManager.get_reasoning_parser, tokenizer
        )
    return Parsers(tool_call, reasoning)


def _model_types(model_config: ModelConfig) -> set[str]:
    """Returns the model's type and, of a multimodal model, its language model's."""
    configs = (model_config.hf_config, model_config.hf_text_config)
    return {model_type for config in configs if (model_type := getattr(config, "model_type", None))}


def _chat_template(config: OutriderConfig, model_config: ModelConfig, tokenizer: Any) -> str | None:
    """Returns the template for a chat with tools, None for tokenizers that have none, such as Mistral's."""
    template = configured_chat_template(config)
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    return resolve_chat_template(tokenizer, template, [], model_config=model_config)


def _usable(key: str, parser: str | None, made_by: Callable[[str], Any], tokenizer: Any) -> str | None:
    """Returns the parser, or None if it cannot be made for a tokenizer that lacks the family's special tokens."""
    if parser is None:
        return None
    try:
        made_by(parser)(tokenizer)
    except Exception as error:  # noqa: BLE001 - a parser's constructor raises what it likes
        logger.warning("openai.%s: %s fits the model's family, but not its tokenizer: %s", key, parser, error)
        return None
    return parser


def parsers_of_family(model_types: Collection[str], chat_template: str | None) -> Parsers:
    """Returns the parsers for a model of these types with this Jinja template.

    A parser is None where no family fits, or several families with different parsers. Without ``tools`` in the template
    the model never hears of tools, so its answers have no tool calls.
    """
    if not chat_template:
        return Parsers()
    reads_tools = _READS_TOOLS.search(chat_template) is not None
    return Parsers(
        _only_parser(TOOL_CALL_FAMILIES, model_types, chat_template) if reads_tools else None,
        _only_parser(REASONING_FAMILIES, model_types, chat_template),
    )


def _only_parser(families: Sequence[Family], model_types: Collection[str], chat_template: str) -> str | None:
    """Returns the parser of the families that fit, None if there is none or more than one."""
    # A string in a template writes a newline as itself or as an escape, and may escape quotation marks.
    text = chat_template.replace("\n", r"\n").replace(r"\"", '"')
    fitting = {
        family.parser
        for family in families
        if not family.model_types.isdisjoint(model_types)
        and all(mark in text for mark in family.marks)
        and not any(mark in text for mark in family.never)
    }
    return fitting.pop() if len(fitting) == 1 else None
