"""Which of vLLM's parsers read a model's answers: chosen where the model's family is certain. Pure.

A parser is chosen by the model's type and by what its chat template tells the model to write, for one type is many
models: ``qwen3_moe`` is Qwen3, whose calls are JSON, and Qwen3-Coder, whose calls are XML. The names are vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's names; None: none, requests with tools are refused, and reasoning stays in the answer."""

    tool_call: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    models: str
    """For people."""

    parser: str
    model_types: frozenset[str]
    """``model_type`` of config.json; one of them is enough."""

    marks: tuple[str, ...]
    """Text that the chat template has, all of it."""

    never: tuple[str, ...] = ()
    """Text of templates of another family, which otherwise look the same."""


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
"""Models that reason without being asked to. Others, such as Granite and DeepSeek V3.1, do so on request, and a parser
that waits for the end of what never began would take the answer for reasoning."""

_READS_TOOLS = re.compile(r"\{%[-+]?\s*(?:if|elif|for|set)\b[^%]*\btools\b")


def chosen(model_types: Collection[str], chat_template: str | None) -> Parsers:
    """For a model of these types (a multimodal model has its language model's too) with this Jinja template.

    None where no family fits, or families that differ in their parser do. A template that does not read ``tools``
    never tells the model of any: no tool call is looked for.
    """
    if not chat_template:
        return Parsers()
    reads_tools = _READS_TOOLS.search(chat_template) is not None
    return Parsers(
        _only(TOOL_CALL_FAMILIES, model_types, chat_template) if reads_tools else None,
        _only(REASONING_FAMILIES, model_types, chat_template),
    )


def _only(families: Sequence[Family], model_types: Collection[str], chat_template: str) -> str | None:
    # In a template's strings a newline is two characters or itself, and a quotation mark may have a backslash.
    text = chat_template.replace("\n", r"\n").replace(r"\"", '"')
    fitting = {
        family.parser
        for family in families
        if not family.model_types.isdisjoint(model_types)
        and all(mark in text for mark in family.marks)
        and not any(mark in text for mark in family.never)
    }
    return fitting.pop() if len(fitting) == 1 else None
