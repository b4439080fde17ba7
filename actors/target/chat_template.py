"""The chat template that the configuration names: the same for every API."""

from __future__ import annotations

from vllm.exceptions import VLLMClientError
from vllm.renderers.chat_utils import load_chat_template

from cluster.config import ConfigError, OutriderConfig


def configured_chat_template(config: OutriderConfig) -> str | None:
    """None: the tokenizer's own. Raises ConfigError for a file that cannot be read."""
    try:
        template: str | None = load_chat_template(config.openai.chat_template)
    except (VLLMClientError, ValueError, OSError) as error:
        raise ConfigError(f"openai.chat_template: {error.args[0] if error.args else error}") from error
    return template
