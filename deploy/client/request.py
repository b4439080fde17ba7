"""The Python client's options, and the request messages they become."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from outrider.deploy.client.error import FieldViolation, OutriderError, invalid
from outrider.v1 import generation_pb2 as pb

__all__ = [
    "ChatOptions",
    "ChatPrompt",
    "FieldViolation",
    "GenerationOptions",
    "OutriderError",
    "TemplateOptions",
    "TokenizeOptions",
    "build_chat_request",
    "build_detokenize_request",
    "build_request",
    "build_tokenize_request",
]

_REQUEST_FIELDS = ("request_id", "model", "apply_chat_template", "cache_salt", "adapter")
_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_SPECULATION_FIELDS = {"speculation": "enabled", "num_speculative_tokens": "num_speculative_tokens"}

_VERIFICATIONS = {
    "rejection": pb.VERIFICATION_REJECTION,
    "block": pb.VERIFICATION_BLOCK,
    "coupled": pb.VERIFICATION_COUPLED,
}
_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Options that are the constraint in sampling.structured_outputs, and their fields there."""

_NOT_OPTIONS = ("structured_outputs",)
"""Fields of sampling that are filled in from options of other names."""

_MESSAGE_FIELDS = tuple(field.name for field in pb.ChatMessage.DESCRIPTOR.fields)

_Request = TypeVar("_Request", pb.GenerateRequest, pb.GenerateStreamRequest)

ChatPrompt = Sequence[Mapping[str, str] | pb.ChatMessage]
"""A conversation, oldest message first, each with the fields of ChatMessage: ``role``, ``content``, ``name``."""


class GenerationOptions(TypedDict, total=False):
    """Everything about a request but its prompt. What is left out, or None, the server decides.

    Limits and defaults are those of the fields of the same name in ``generation.proto``.
    """

    request_id: str | None
    model: str | None
    apply_chat_template: bool | None
    cache_salt: str | None
    """The prompt shares cached blocks with prompts of the same salt only."""

    adapter: str | None
    """LoRA adapter to answer with, by its name."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    json_schema: str | Mapping[str, Any] | None
    """This and the next four go into structured_outputs: one of them at most."""

    json_object: bool | None
    """True: any JSON object."""

    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    speculation: bool | None
    """False: decode without drafts."""

    num_speculative_tokens: int | None
    verification: str | None
    """``rejection``, ``block`` or ``coupled``."""

    timeout_s: float | None
    """Seconds for the whole call, above 0. It is both the call's deadline and the engine's."""


class TemplateOptions(TypedDict, total=False):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(GenerationOptions, TemplateOptions, total=False):
    """Everything about a request but its messages."""


class TokenizeOptions(TemplateOptions, total=False):
    """Everything about a prompt that is only tokenised. Those of TemplateOptions go with messages alone."""

    model: str | None
    add_special_tokens: bool | None
    return_token_strs: bool | None


def build_request(request: _Request, prompt: str | Sequence[int], options: GenerationOptions) -> _Request:
    """Fill in request. Raises OutriderError for a value its field cannot hold, TypeError for an unknown option."""
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        request.token_ids.SetInParent()
        _put(request.token_ids, "ids", prompt, "token_ids")
    return _fill(request, _given(options))


def build_chat_request(request: _Request, messages: ChatPrompt, options: ChatOptions) -> _Request:
    """The same for a conversation."""
    remaining = _given(options)
    _put_chat(request.chat, messages, remaining)
    return _fill(request, remaining)


def build_tokenize_request(prompt: str | ChatPrompt, options: TokenizeOptions) -> pb.TokenizeRequest:
    """Raises as build_request does."""
    request, remaining = pb.TokenizeRequest(), _given(options)
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        _put_chat(request.chat, prompt, remaining)
    for name in ("model", "add_special_tokens", "return_token_strs"):
        if name in remaining:
            _put(request, name, remaining.pop(name), name)
    if remaining:
        raise TypeError(f"unknown option {next(iter(remaining))!r} of tokenize; see TokenizeOptions")
    return request


def build_detokenize_request(
    token_ids: Sequence[int], skip_special_tokens: bool | None, model: str | None
) -> pb.DetokenizeRequest:
    """Raises OutriderError for a value its field cannot hold."""
    request = pb.DetokenizeRequest()
    _put(request, "token_ids", list(token_ids), "token_ids")
    for name, value in (("skip_special_tokens", skip_special_tokens), ("model", model)):
        if value is not None:
            _put(request, name, value, name)
    return request


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _fill(request: _Request, remaining: dict[str, Any]) -> _Request:
    """Everything but the prompt."""
    for name in _REQUEST_FIELDS:
        if name in remaining:
            _put(request, name, remaining.pop(name), name)
    for name, field in _SPECULATION_FIELDS.items():
        if name in remaining:
            _put(request.speculation, field, remaining.pop(name), f"speculation.{field}")
    if "verification" in remaining:
        request.speculation.verification = _verification(remaining.pop("verification"))
    if "timeout_s" in remaining:
        timeout_s = remaining.pop("timeout_s")
        if not 0 < timeout_s < math.inf:
            raise invalid("timeout_s", f"{timeout_s} is not a time to wait; send a number of seconds above 0")
        _put(request, "timeout_ms", math.ceil(timeout_s * 1000), "timeout_ms")
    given = [name for name in _CONSTRAINTS if name in remaining]
    if len(given) > 1:
        raise invalid("sampling.structured_outputs", f"{' and '.join(given)} are given; send one of them")
    for name in given:
        _put_constraint(request.sampling.structured_outputs, _CONSTRAINTS[name], remaining.pop(name))
    for name, value in remaining.items():
        if name in _NOT_OPTIONS or name not in pb.SamplingParameters.DESCRIPTOR.fields_by_name:
            raise TypeError(f"unknown option {name!r}; see GenerationOptions")
        if name in ("stop", "bad_words") and isinstance(value, str):
            value = [value]
        _put(request.sampling, name, value, f"sampling.{name}")
    return request


def _put_chat(chat: pb.Chat, messages: ChatPrompt, remaining: dict[str, Any]) -> None:
    """Take the template's options out of remaining."""
    chat.SetInParent()
    if isinstance(messages, str | bytes | Mapping):
        raise invalid("chat.messages", "is not a list of messages; send [{'role': 'user', 'content': ...}]")
    for number, message in enumerate(messages):
        public_name = f"chat.messages[{number}]"
        if isinstance(message, pb.ChatMessage):
            chat.messages.append(message)
            continue
        if not isinstance(message, Mapping):
            raise invalid(public_name, "is not a message; send {'role': ..., 'content': ...}")
        if unknown := sorted(str(name) for name in message if name not in _MESSAGE_FIELDS):
            raise invalid(f"{public_name}.{unknown[0]}", f"is not known here; send {', '.join(_MESSAGE_FIELDS)}")
        added = chat.messages.add()
        for name, value in _given(message).items():
            _put(added, name, value, f"{public_name}.{name}")
    for name in _TEMPLATE_FIELDS:
        if name in remaining:
            _put(chat, name, remaining.pop(name), f"chat.{name}")


def _put_constraint(message: pb.StructuredOutputs, field: str, value: Any) -> None:
    public_name = f"sampling.structured_outputs.{field}"
    if field == "choice":
        if isinstance(value, str):
            raise invalid(public_name, "is one text; send a list of them")
        message.choice.SetInParent()
        _put(message.choice, "values", value, public_name)
        return
    if field == "json" and isinstance(value, Mapping):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise invalid(public_name, f"is not a JSON schema: {error}") from None
    _put(message, field, value, public_name)


def _verification(name: str) -> pb.Verification:
    try:
        return _VERIFICATIONS[name]
    except (KeyError, TypeError):
        raise invalid("speculation.verification", f"{name!r} is none of {', '.join(_VERIFICATIONS)}") from None


def _put(message: Any, field: str, value: Any, public_name: str) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, field).update(value)  # a map, or a Struct
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid(public_name, f"not a value this field can hold: {error}") from None
