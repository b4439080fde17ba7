"""Reads from a request what the router needs to choose a replica, without a tokenizer or a chat template.

A prompt's fingerprint is a chain of block hashes over what the client sent: two prompts share as many hashes as blocks
they start with. The same chat has the same fingerprint over gRPC and HTTP.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # replica_calls imports this module
    from outrider.actors.replica_calls import GenerationRequest

USUAL_ANSWER_TOKENS = 256
"""Tokens expected of an answer without max_tokens, and the most expected of any answer."""

BLOCK_SIZES = ((64, 128), (64, 1024), (64, 8192))
"""(blocks, bytes each), in order. Text beyond the last block does not count."""

PICTURE_CHARS = 2048
"""Characters that a picture counts for: about 512 tokens, as most models make of one."""

_BYTES_PER_TOKEN = 4
_BLOCK_BYTES = tuple(size for count, size in BLOCK_SIZES for _ in range(count))
MAX_BYTES = sum(_BLOCK_BYTES)
_MOST_ANSWERS = 4096
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

Fingerprint = tuple[int, ...]


@dataclass(frozen=True)
class RoutedRequest:
    """Holds what the routing policy knows of a request."""

    fingerprint: Fingerprint = ()
    prompt_tokens: int = 0
    """Estimated from the text, exact for token ids."""

    answer_tokens: int = 0
    """Expected of all answers together."""

    wants_drafts: bool = False
    sets_max_tokens: bool = False
    """The client says how long an answer may be. Not needed for routing: `openai.engine` limits the others."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def of_generation(request: GenerationRequest) -> RoutedRequest:
    """Profiles a gRPC request."""
    if request.prompt_token_ids is not None:
        prompt = token_fingerprint(request.prompt_token_ids), len(request.prompt_token_ids)
    elif request.prompt_chat is not None:
        prompt = _chat(*((message.role, message.content) for message in request.prompt_chat.messages))
    elif request.apply_chat_template:
        prompt = _chat("user", request.prompt_text)
    else:
        prompt = _text(request.prompt_text or "")
    return RoutedRequest(
        with_adapter(prompt[0], request.adapter),
        prompt[1],
        request.num_answers * _answer_tokens(request.sampling),
        request.speculation and request.num_speculative_tokens != 0,
    )


def of_body(body: Mapping[str, Any], served_model: str | None = None) -> RoutedRequest | None:
    """Profiles a JSON body in the shape of one of vLLM's HTTP routes that generate. Raises nothing, however malformed
    the body is.

    Args:
        body: Decoded. The shape says what it is, as ``/invocations`` takes several: ``messages`` is a chat, ``input``
            a response, ``prompt`` a completion, ``token_ids`` a prompt of ``/inference/v1/generate``.
        served_model: Any other name in ``model`` is a LoRA adapter, which shares no prefix with the model. None: names
            do not matter.

    Returns:
        None for a body without a prompt, which vLLM refuses.
    """
    sampling: Any = body
    prompts = 1
    if "messages" in body:  # Anthropic's system prompt is a field of its own
        prompt = _chat(body.get("tools"), body.get("system"), body["messages"])
    elif "input" in body:
        prompt = _chat(body.get("tools"), body.get("instructions"), body["input"])
    elif "prompt" in body:
        fingerprints = [_text(each) if isinstance(each, str) else _ids(each) for each in _prompts(body["prompt"])]
        prompts = max(1, len(fingerprints))
        prompt = (fingerprints[0][0] if fingerprints else (), sum(tokens for _, tokens in fingerprints))
    elif "token_ids" in body:
        prompt = _ids(body["token_ids"])
        sampling = body.get("sampling_params") or {}
    else:
        return None
    sampling = sampling if isinstance(sampling, Mapping) else {}
    answers = sampling.get("n")
    answers = min(answers, _MOST_ANSWERS) if isinstance(answers, int) and answers > 0 else 1
    extra = body.get("vllm_xargs") if sampling is body else sampling.get("extra_args")
    extra = extra if isinstance(extra, Mapping) else {}
    model = body.get("model")
    return RoutedRequest(
        with_adapter(prompt[0], model if isinstance(model, str) and served_model not in (None, model) else None),
        prompt[1],
        prompts * answers * _answer_tokens(sampling),
        all(extra.get(f"speculation.{key}") != 0 for key in ("enabled", "num_speculative_tokens")),
        any(sampling.get(name) is not None for name in _MAX_TOKENS),
    )


def block_tokens(block: int) -> int:
    """Returns the tokens in a block, by its place in the chain."""
    return _BLOCK_BYTES[block] // _BYTES_PER_TOKEN


def text_fingerprint(text: str) -> Fingerprint:
    """Hashes a prompt that is raw text."""
    return _chain(b"text", text[:MAX_BYTES].encode(errors="surrogatepass"))


def token_fingerprint(token_ids: Sequence[int]) -> Fingerprint:
    """Hashes a prompt of token ids. Empty where one is no unsigned 32-bit number."""
    try:
        return _chain(b"ids", array("I", token_ids[: MAX_BYTES // _BYTES_PER_TOKEN]).tobytes())
    except (OverflowError, TypeError):
        return ()


def with_adapter(fingerprint: Fingerprint, adapter: str | None) -> Fingerprint:
    """Changes every hash by the adapter's name, since cached blocks of two adapters are never shared."""
    if adapter is None:
        return fingerprint
    own = int.from_bytes(blake2b(adapter.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
    return tuple(block ^ own for block in fingerprint)


def _chain(kind: bytes, data: bytes) -> Fingerprint:
    """Hashes each whole block together with all before it. A last block that is not full is left out."""
    chain, parent, start = [], kind, 0
    for size in _BLOCK_BYTES:
        if start + size > len(data):
            break
        parent = blake2b(parent + data[start : start + size], digest_size=8).digest()
        chain.append(int.from_bytes(parent, "little"))
        start += size
    return tuple(chain)


def _text(text: str) -> tuple[Fingerprint, int]:
    return text_fingerprint(text), len(text) // _BYTES_PER_TOKEN


def _ids(token_ids: Any) -> tuple[Fingerprint, int]:
    return (token_fingerprint(token_ids), len(token_ids)) if isinstance(token_ids, list) else ((), 0)


def _chat(*said: Any) -> tuple[Fingerprint, int]:
    """Profiles a conversation by its strings, in order: roles, texts, what tools are and have said."""
    try:
        texts = list(_strings(said))
    except RecursionError:
        texts = []
    prompt = "\0".join(texts)[:MAX_BYTES].encode(errors="surrogatepass")
    return _chain(b"chat", prompt), sum(map(len, texts)) // _BYTES_PER_TOKEN


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value. A long string without spaces, such as base64 data, is replaced by its digest,
    repeated to PICTURE_CHARS characters."""
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, str):
        if len(value) > PICTURE_CHARS and value.isascii() and not any(map(str.isspace, value[:PICTURE_CHARS])):
            digest = blake2b(value.encode(), digest_size=16).hexdigest()
            value = digest * (PICTURE_CHARS // len(digest))
        yield value
        return
    elif not isinstance(value, Iterable):
        return
    for each in value:
        yield from _strings(each)


def _prompts(prompt: Any) -> list[Any]:
    """Returns a completion's prompts: it is a text, token ids, or a list of either."""
    many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return [each for each in (prompt if many else [prompt]) if isinstance(each, list | str)]


def _answer_tokens(sampling: Mapping[str, Any]) -> int:
    """Returns what is expected of one answer, by the limits that are given."""
    limits = map(sampling.get, _MAX_TOKENS)
    return min([USUAL_ANSWER_TOKENS, *(each for each in limits if isinstance(each, int) and each > 0)])
