"""OpenAI's requests and answers as they pass between the front doors and a replica, and what a body says.

Free of vLLM: the ingress loads this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from outrider.actors.replica_calls import BYTES_PER_TOKEN, Deadline, MayHaveDeadline

Endpoint = Literal["chat", "completions", "responses", "tokenize", "detokenize", "models", "openapi"]
"""``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, ``/tokenize``, ``/detokenize``, ``/v1/models``,
``/openapi.json``."""

GENERATING: frozenset[Endpoint] = frozenset({"chat", "completions", "responses"})
"""Endpoints that keep the engine busy."""


@dataclass(frozen=True)
class OpenAIRequest(MayHaveDeadline):
    """A request whose fields have been checked by name (actors/serving/openai/door.py). Values are vLLM's to check."""

    endpoint: Endpoint
    request_id: str
    body: dict[str, Any] = field(default_factory=dict)
    """Decoded JSON in vLLM's schema, without fields of ours."""

    round_options: dict[str, Any] = field(default_factory=dict)
    """What goes under EXTRA_ARGS_KEY into SamplingParams.extra_args: see outrider.actors.round.request."""

    trace_headers: dict[str, str] = field(default_factory=dict)
    """``traceparent``, ``tracestate`` of the caller."""

    avoid_replicas: tuple[str, ...] = ()
    """Replicas that have just failed this request."""

    deadline: Deadline | None = None
    """After which the answer is worthless."""

    adapter: str | None = None
    """What ``model`` in the body names, where that is not the model itself."""

    way_out: tuple[str, ...] = ()
    """As of a GenerationRequest."""

    @property
    def num_answers(self) -> int:
        """Prompts times n."""
        n = self.body.get("n")
        return len(self.prompts()) * (n if isinstance(n, int) and n > 0 else 1)

    @property
    def max_tokens(self) -> int | None:
        """Of one answer; None: what max_model_len leaves, or vLLM's default."""
        asked = next(
            filter(None, map(self.body.get, ("max_completion_tokens", "max_tokens", "max_output_tokens"))), None
        )
        return asked if isinstance(asked, int) and asked > 0 else None

    @property
    def logprobs(self) -> int | None:
        """Likeliest tokens asked for with each of an answer; None: no log-probabilities."""
        if self.endpoint == "completions":
            return _number(self.body.get("logprobs"))
        if self.endpoint == "chat" and not self.body.get("logprobs"):
            return None
        if self.endpoint == "responses" and not self.body.get("top_logprobs"):
            return None
        return _number(self.body.get("top_logprobs")) or 0

    @property
    def prompt_logprobs(self) -> int | None:
        """Likewise of the prompt, which vLLM echoes with as many as are asked for of the answer."""
        asked = _number(self.body.get("prompt_logprobs"))
        if asked is not None or not self.body.get("echo"):
            return asked
        return self.logprobs if self.endpoint == "completions" else _number(self.body.get("top_logprobs")) or 0

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, with the tools and documents that a template puts beside them. Estimated, but for prompts of
        token ids."""
        beside = chars_beside(self.body)
        if self.endpoint == "chat":
            messages = self.body.get("messages")
            contents = [each.get("content") for each in messages or () if isinstance(each, dict)]
            return (beside + sum(_text_length(content) for content in contents)) // BYTES_PER_TOKEN
        if self.endpoint == "responses":
            said = sum(len(content) for _, content in spoken_in_response(self.body))
            return (beside + said) // BYTES_PER_TOKEN
        return sum(
            len(prompt) if isinstance(prompt, list) else _text_length(prompt) // BYTES_PER_TOKEN
            for prompt in self.prompts()
        )

    def prompts(self) -> list[Any]:
        """A completion's; one, of whatever is none."""
        prompt = self.body.get("prompt")
        if self.endpoint != "completions" or not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return prompt


BESIDE_MESSAGES = ("tools", "documents", "chat_template_kwargs")
"""Fields of a chat or response whose texts its template may use."""


def num_chars(value: Any, *, keys: bool = False, length: Callable[[str], int] = len) -> int:
    """Of all texts in a value of JSON. keys: of its objects' keys too. length: how one is counted."""
    chars, left = 0, [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            chars += length(found)
        elif isinstance(found, dict):
            chars += sum(map(length, found)) if keys else 0
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)
    return chars


def chars_beside(body: Mapping[str, Any]) -> int:
    """Of all that the template of a chat or response may use beside its messages."""
    return sum(num_chars(body.get(name), keys=True) for name in BESIDE_MESSAGES)


def _number(value: Any) -> int | None:
    """None for what is none: the door lets no other number pass."""
    return max(0, value) if isinstance(value, int) else None


def spoken(content: Any) -> str:
    """text_of, with as much in place of each picture as it counts for, which tells it from others."""
    if not isinstance(content, list):
        return text_of(content)
    return "".join(map(_spoken_part, (part for part in content if isinstance(part, dict))))


def _spoken_part(part: dict[str, Any]) -> str:
    if (url := picture_in(part)) is None:
        return text_of(part.get("text"))
    digest = blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return digest * (PICTURE_CHARS // len(digest))


def _text_length(content: Any) -> int:
    """Of a text, or of OpenAI's list of parts, with their pictures."""
    return len(text_of(content)) + PICTURE_CHARS * len(pictures_in(content))


def text_of(content: Any) -> str:
    """A text, or what OpenAI's list of parts says."""
    if isinstance(content, list):
        return "".join(text_of(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


PICTURE_CHARS = 2048
"""A picture counts as so many, where a prompt's tokens are estimated: some 500 tokens, which is what most models make
of one."""


def picture_in(part: Mapping[str, Any]) -> str | None:
    """The URL of the picture in one of OpenAI's parts: a chat's has an object around it, a response's has not."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, dict) else found if part.get("type") == "input_image" else None
    return url if isinstance(url, str) and url else None


def pictures_in(content: Any) -> list[str]:
    """Their URLs, of a text or of OpenAI's list of parts."""
    parts = content if isinstance(content, list) else ()
    return [url for part in parts if isinstance(part, dict) and (url := picture_in(part)) is not None]


def spoken_in_response(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Role and text of what a body of ``/v1/responses`` says, in order, much as its chat template will have them."""
    instructions, items = body.get("instructions"), body.get("input")
    said = [("system", instructions)] if isinstance(instructions, str) else []
    if isinstance(items, str):
        return [*said, ("user", items)]
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        role = "tool" if "output" in item else str(item.get("role") or "assistant")
        parts = (item.get(name) for name in ("content", "name", "arguments", "input", "output"))
        said.append((role, "".join(map(spoken, parts))))
    return said


@dataclass(frozen=True)
class TokensUsed:
    """Between an OpenAI answer's parts: tokens since the last of these."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class OpenAIHead:
    """The first thing that comes back. The body's parts, text, follow: server-sent events as they are made, or one
    whole JSON document."""

    status: int
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    """Of a whole document."""

    @property
    def is_stream(self) -> bool:
        return self.media_type == "text/event-stream"
