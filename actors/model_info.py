"""What a target serves: what stays the same for as long as it is served."""

from __future__ import annotations

from dataclasses import dataclass

VERIFICATIONS = ("rejection", "block", "coupled")


@dataclass(frozen=True)
class ModelInfo:
    max_model_len: int
    vocab_size: int
    dtype: str
    architecture: str
    tokenizer: str
    """Its class."""

    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    verifications: tuple[str, ...] = ()
    """Ways to verify drafts that a request may ask for, of VERIFICATIONS."""

    default_verification: str | None = None
    methods: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
