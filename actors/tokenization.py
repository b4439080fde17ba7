"""What the ingress asks of a target's tokenizer, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

from actors.generation import ChatPrompt


@dataclass(frozen=True)
class TokenizeRequest:
    """A prompt to tokenise. Exactly one of text and chat is set."""

    text: str | None = None
    chat: ChatPrompt | None = None
    add_special_tokens: bool | None = None
    """None: True for text, False for chat."""

    return_token_strs: bool = False


@dataclass(frozen=True)
class Tokens:
    """What a prompt is to the model."""

    token_ids: tuple[int, ...]
    max_model_len: int
    token_strs: tuple[str, ...] = ()
    """As the vocabulary spells them, when asked for."""
