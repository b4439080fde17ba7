"""From the arguments of a call to a target replica to what the routing policy knows of it: a cheap look, no tokenizer.

What a prompt begins with is a chain of block hashes: two prompts share as many hashes as blocks they start with. It is
computed where requests are routed, of what the client sent, without tokenizer and chat template. HTTP and gRPC requests
with the same prompt look the same, so they find each other's prefixes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from outrider.actors.openai_calls import GENERATING, OpenAIRequest, spoken, spoken_in_response
from outrider.actors.replica_calls import BYTES_PER_TOKEN, GenerationRequest

USUAL_ANSWER_TOKENS = 256
"""Expected of an answer whose length is not limited, and the most that is expected of one that is."""

BLOCK_SIZES = ((64, 128), (64, 1024), (64, 8192))
"""(blocks, bytes each), in order: fine at first, where prompts differ, coarse later. What lies beyond is not looked
at."""

_BLOCK_BYTES = tuple(size for count, size in BLOCK_SIZES for _ in range(count))
MAX_BYTES = sum(_BLOCK_BYTES)


@dataclass(frozen=True)
class RoutedRequest:
    """What the policy knows of a request."""

    fingerprint: tuple[int, ...] = ()
    prompt_tokens: int = 0
    """Estimated, but for prompts of token ids."""

    answer_tokens: int = 0
    """Expected, of all answers together."""

    wants_drafts: bool = False
    avoid: frozenset[str] = frozenset()
    """Replicas that have just failed it."""

    caller: int = 0
    """Whose it is; 0: nobody knows."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def profile(args: Sequence[Any]) -> RoutedRequest | None:
    """args: positional arguments of the call. None for calls that generate nothing: status, tokenize, models."""
    request = args[0] if args else None
    if isinstance(request, GenerationRequest):
        return _of_generation(request)
    if isinstance(request, OpenAIRequest) and request.endpoint in GENERATING:
        return _of_openai(request)
    return None


def _of_generation(request: GenerationRequest) -> RoutedRequest:
    fingerprint, tokens = _prompt(request)
    return RoutedRequest(
        with_adapter(fingerprint, request.adapter),
        tokens,
        request.num_answers * _answer_tokens(request.sampling.get("max_tokens")),
        request.speculation and request.num_speculative_tokens != 0,
        frozenset(request.avoid_replicas),
        request.caller,
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
    elif request.endpoint == "responses":
        fingerprint, tokens = _chat(spoken_in_response(body), body.get("tools"))
    else:
        prompts = _prompts(body.get("prompt"))
        answers *= max(1, len(prompts))
        fingerprint = _completion_fingerprint(prompts[0]) if prompts else ()
        tokens = sum(len(prompt) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    return RoutedRequest(
        with_adapter(fingerprint, request.adapter),
        tokens,
        answers * _answer_tokens(request.max_tokens),
        options.get("num_speculative_tokens") != 0,
        frozenset(request.avoid_replicas),
        options.get("caller", 0),
    )


def _chat(messages: Sequence[tuple[str, str]], tools: Any = None) -> tuple[tuple[int, ...], int]:
    """messages: role and content. Templates put tools before what is said."""
    preamble = json.dumps(tools, sort_keys=True, default=str) if tools else ""
    length = len(preamble) + sum(len(content) for _, content in messages)
    return chat_fingerprint(messages, preamble), length // BYTES_PER_TOKEN


def _spoken(messages: Any) -> list[tuple[str, str]]:
    """Role and content of a body's messages. What is no message, vLLM will refuse."""
    return [
        (str(message.get("role")), spoken(message.get("content")))
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping)
    ]


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


def block_tokens(block: int) -> int:
    """Tokens in a block, by its place in the chain."""
    return _BLOCK_BYTES[block] // BYTES_PER_TOKEN


def text_fingerprint(text: str) -> tuple[int, ...]:
    """Of a prompt that is raw text."""
    return _chain(b"text", text[:MAX_BYTES].encode(errors="surrogatepass"))


def token_fingerprint(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Of a prompt that is token ids. Raises OverflowError for one that is no 32-bit number."""
    return _chain(b"ids", array("I", token_ids[: MAX_BYTES // BYTES_PER_TOKEN]).tobytes())


def chat_fingerprint(messages: Iterable[tuple[str, str]], preamble: str = "") -> tuple[int, ...]:
    """Of a conversation: (role, content) by message. preamble: what else goes into the template's beginning, such as
    the tools."""
    parts, length = [preamble], len(preamble)
    for role, content in messages:
        parts += [role, content]
        length += len(role) + len(content)
        if length > MAX_BYTES:
            break
    return _chain(b"chat", "\0".join(parts)[:MAX_BYTES].encode(errors="surrogatepass"))


def with_adapter(fingerprint: tuple[int, ...], adapter: str | None) -> tuple[int, ...]:
    """Prompts share nothing with those of another adapter: a model's caches hold what it made of them with that one."""
    if adapter is None:
        return fingerprint
    own = int.from_bytes(blake2b(adapter.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
    return tuple(block ^ own for block in fingerprint)


def _chain(kind: bytes, data: bytes) -> tuple[int, ...]:
    """One hash per whole block, each over all that comes before it. A last block that is not full is left out: how it
    would go on decides whether it is shared."""
    chain, parent, start = [], kind, 0
    for size in _BLOCK_BYTES:
        if start + size > len(data):
            break
        parent = blake2b(parent + data[start : start + size], digest_size=8).digest()
        chain.append(int.from_bytes(parent, "little"))
        start += size
    return tuple(chain)
