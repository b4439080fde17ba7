"""What OpenAI's HTTP endpoints need to know of the model."""

from __future__ import annotations

from pydantic import Field

from cluster.config_section import Section


class OpenAIConfig(Section):
    """Keys are vLLM's."""

    chat_template: str | None = Field(None, min_length=1)
    """File with a Jinja template for chats, or the template itself. None: the tokenizer's own."""

    tool_call_parser: str | None = Field(None, min_length=1)
    """vLLM's name of the format in which the model calls tools, e.g. ``hermes``. None: requests with ``tools`` are
    refused, unless with ``tool_choice: none``."""

    reasoning_parser: str | None = Field(None, min_length=1)
    """vLLM's name of the format in which the model marks its reasoning, e.g. ``qwen3``; it then comes apart from the
    answer, and grammars hold for the answer only."""
