"""Which parsers read this deployment's answers: those that the configuration names, or those of the model's family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.config import ModelConfig
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from outrider.actors.vllm_adapter.parser_families import AUTO, Parsers, chosen
from outrider.actors.vllm_adapter.prompts import configured_chat_template
from outrider.cluster.config import OutriderConfig

logger = logging.getLogger("ray.serve.outrider.openai")


def answer_parsers(config: OutriderConfig, model_config: ModelConfig) -> Parsers:
    """The same however often it is asked. A name in the configuration is taken as it is: vLLM judges it.

    Raises ConfigError for a chat template that cannot be read.
    """
    named = config.openai
    if AUTO not in (named.tool_call_parser, named.reasoning_parser):
        return Parsers(named.tool_call_parser, named.reasoning_parser)
    tokenizer = cached_tokenizer_from_config(model_config)
    of_family = chosen(_model_types(model_config), _chat_template(config, model_config, tokenizer))
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
    configs = (model_config.hf_config, model_config.hf_text_config)
    return {model_type for config in configs if (model_type := getattr(config, "model_type", None))}


def _chat_template(config: OutriderConfig, model_config: ModelConfig, tokenizer: Any) -> str | None:
    """What a chat with tools is rendered with. None for tokenizers that render by other means, such as Mistral's."""
    template = configured_chat_template(config)
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    return resolve_chat_template(tokenizer, template, [], model_config=model_config)


def _usable(key: str, parser: str | None, made_by: Callable[[str], Any], tokenizer: Any) -> str | None:
    """None for a parser that cannot be made: it misses a token that only the family's own tokenizer has."""
    if parser is None:
        return None
    try:
        made_by(parser)(tokenizer)
    except Exception as error:  # noqa: BLE001 - a parser's constructor raises what it likes
        logger.warning("openai.%s: %s fits the model's family, but not its tokenizer: %s", key, parser, error)
        return None
    return parser
