"""From the arguments of a call to a target replica to what the policy knows of it: a cheap look, no tokenizer.

HTTP and gRPC requests with the same prompt look the same, so they find each other's prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.actors.replica_calls import GenerationRequest, OpenAIRequest
from outrider.actors.serving.routing.policy import RoutedRequest
from outrider.actors.serving.routing.prefix import (
    BYTES_PER_TOKEN,
    chat_fingerprint,
    text_fingerprint,
    token_fingerprint,
)

USUAL_ANSWER_TOKENS = 256
"""Expected of an answer whose length is not limited, and the most that is expected of one that is."""


def profile(args: Sequence[Any]) -> RoutedRequest | None:
    """args: positional arguments of the call. None for calls that generate nothing: status, tokenize, models."""
    request = args[0] if args else None
    if isinstance(request, GenerationRequest):
        return _of_generation(request)
    if isinstance(request, OpenAIRequest) and request.endpoint in ("chat", "completions"):
        return _of_openai(request)
    return None


def _of_generation(request: GenerationRequest) -> RoutedRequest:
    fingerprint, tokens = _prompt(request)
    return RoutedRequest(
        fingerprint,
        tokens,
        request.num_answers * _answer_tokens(request.sampling.get("max_tokens")),
        request.speculation and request.num_speculative_tokens != 0,
        frozenset(request.avoid_replicas),
    )


def _prompt(request: GenerationRequest) -> tuple[tuple[int, ...], int]:
    """Fingerprint and tokens."""
    if request.prompt_token_ids is not None:
        return token_fingerprint(request.prompt_token_ids), len(request.prompt_token_ids)
    if request.prompt_chat is not None:
        return _chat([(message.role, message.content) for message in request.prompt_chat.messages])
    text = request.prompt_text or ""
    if request.apply_chat_template:
        return _chat([("user", text)])
    return text_fingerprint(text), len(text) // BYTES_PER_TOKEN


def _of_openai(request: OpenAIRequest) -> RoutedRequest:
    body = request.body
    options = request.round_options
    answers = _at_least_one(body.get("n"))
    if request.endpoint == "chat":
        fingerprint, tokens = _chat(_spoken(body.get("messages")), body.get("tools"))
    else:
        prompts = _prompts(body.get("prompt"))
        answers *= max(1, len(prompts))
        fingerprint = _completion_fingerprint(prompts[0]) if prompts else ()
        tokens = sum(len(prompt) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return RoutedRequest(
        fingerprint,
        tokens,
        answers * _answer_tokens(limit),
        options.get("num_speculative_tokens") != 0,
        frozenset(request.avoid_replicas),
    )


def _chat(messages: Sequence[tuple[str, str]], tools: Any = None) -> tuple[tuple[int, ...], int]:
    """messages: role and content. Templates put tools before what is said."""
    preamble = json.dumps(tools, sort_keys=True, default=str) if tools else ""
    length = len(preamble) + sum(len(content) for _, content in messages)
    return chat_fingerprint(messages, preamble), length // BYTES_PER_TOKEN


def _spoken(messages: Any) -> list[tuple[str, str]]:
    """Role and content of a body's messages. What is no message, vLLM will refuse."""
    return [
        (str(message.get("role")), _content(message.get("content")))
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping)
    ]


def _content(content: Any) -> str:
    """Text, or OpenAI's list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A completion's prompt is a text, token ids, or a list of either. What is none of it, vLLM will refuse."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        return []
    if _are_ids(prompt):
        return [prompt]
    return [item for item in prompt if isinstance(item, str) or _are_ids(item)]


def _completion_fingerprint(prompt: str | list[int]) -> tuple[int, ...]:
    return text_fingerprint(prompt) if isinstance(prompt, str) else token_fingerprint(prompt)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)


def _at_least_one(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _answer_tokens(limit: Any) -> int:
    return min(limit, USUAL_ANSWER_TOKENS) if isinstance(limit, int) and limit > 0 else USUAL_ANSWER_TOKENS
