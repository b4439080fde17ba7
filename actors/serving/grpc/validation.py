"""From public request messages to what a target replica takes, without a model at hand.

Only what the client set is passed on, so that defaults stay the engine's. Ranges are vLLM's own, checked here so that
the answer names the public field. What needs the tokenizer (length over ``max_model_len``) or a grammar's compiler is
the target's to say. Rules that hold on every API are in outrider.actors.replica_calls.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import struct_pb2

from outrider.actors.replica_calls import (
    ChatMessage,
    ChatPrompt,
    Deadline,
    GenerationRequest,
    RequestError,
    TokenizeRequest,
)
from outrider.actors.request_checks import (
    RANGES,
    chars_of,
    check_chars,
    check_list,
    check_max_tokens,
    check_num_speculative_tokens,
    check_range,
    check_request_id,
    check_seeds,
    check_template_lists,
    check_template_variables,
    check_timeout,
    check_verification_under_grammar,
    most_to_tokenize,
    shown,
    unknown_adapter,
)
from outrider.actors.request_constraints import MAX_CONSTRAINT_BYTES
from outrider.actors.request_costs import (
    MAX_MESSAGES,
    check_in_one_piece,
    check_listed_of_answers,
    check_prompt_logprobs,
)
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest
_NamesModel = GenerationMessage | pb.TokenizeRequest | pb.DetokenizeRequest

MAX_LOGPROBS = 20

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1 (all tokens)"),
    "top_k": (lambda value: value >= -1, "0 (all tokens) or a positive number"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 (off) to 1"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is off)"),
    "max_tokens": (lambda value: value >= 1, "1 or more, or leave it out"),
    "logprobs": (lambda value: value <= MAX_LOGPROBS, f"0 (the token's own) to {MAX_LOGPROBS}, or leave it out"),
    "prompt_logprobs": (lambda value: value <= MAX_LOGPROBS, f"0 (the token's own) to {MAX_LOGPROBS}, or leave it out"),
}
_UNRANGED = (
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
_TEXTS = ("stop", "bad_words")
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")

VERIFICATIONS: dict[pb.Verification, str | None] = {
    pb.VERIFICATION_UNSPECIFIED: None,
    pb.VERIFICATION_REJECTION: "rejection",
    pb.VERIFICATION_BLOCK: "block",
    pb.VERIFICATION_COUPLED: "coupled",
}

MAX_TEMPLATE_DEPTH = 32
MAX_CACHE_SALT = 128


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    num_speculative_tokens: int
    """K; 0: served without a drafter."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    adapters: tuple[str, ...] | None = ()
    """That requests may name; None: not known here, the target checks names."""


def to_generation_request(
    message: GenerationMessage,
    served: ServedModel,
    *,
    request_id: str,
    clock: Callable[[], float] = time.monotonic,
) -> GenerationRequest:
    """Check message and translate it.

    request_id: the client's, or one made for a client that sent none.
    Raises RequestError naming the first public field that is wrong.
    """
    check_request_id(request_id)
    check_model(message, served)
    _check_chars(message, served.limits.max_prompt_chars)
    text, token_ids, chat = _prompt(message, served)
    sampling = to_sampling(message.sampling, served.limits)
    _check_costs(sampling, 0 if token_ids is None else len(token_ids), served.limits)
    in_one_piece = isinstance(message, pb.GenerateRequest)
    if in_one_piece:
        max_tokens, wanted, n = sampling.get("max_tokens"), sampling.get("logprobs"), sampling.get("n", 1)
        check_in_one_piece("sampling.logprobs", max_tokens, wanted, served.limits, n)
    enabled, num_speculative_tokens = _speculation(message.speculation, served)
    return GenerationRequest(
        request_id=request_id,
        prompt_text=text,
        prompt_token_ids=token_ids,
        prompt_chat=chat,
        apply_chat_template=message.apply_chat_template,
        sampling=sampling,
        speculation=enabled,
        num_speculative_tokens=num_speculative_tokens,
        verification=_verification(message),
        deadline=_deadline(message, served.limits, clock),
        cache_salt=_cache_salt(message),
        adapter=_adapter(message, served),
        in_one_piece=in_one_piece,
    )


def check_model(message: _NamesModel, served: ServedModel) -> None:
    """A client may say which model it expects. Raises RequestError."""
    if message.HasField("model") and message.model != served.name:
        if message.model in (served.adapters or ()):
            raise RequestError("model", f"{shown(message.model)} is an adapter", "send it as adapter")
        raise RequestError(
            "model", f"{shown(message.model)} is not served here", f"send {served.name!r} or leave it out"
        )


def _check_chars(message: GenerationMessage | pb.TokenizeRequest, most: int) -> None:
    """Of all that a tokenizer or a template would read."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        check_chars("text", chars_of(message.text), most)
    elif kind == "chat":
        check_list("chat.messages", message.chat.messages, MAX_MESSAGES)
        chars = sum(chars_of(text) for said in message.chat.messages for text in (said.role, said.content, said.name))
        check_chars("chat", chars + message.chat.chat_template_kwargs.ByteSize(), most)


def _check_costs(sampling: dict[str, Any], num_token_ids: int, limits: LimitsConfig) -> None:
    """num_token_ids: 0 for a text, whose tokens the target will know."""
    answers = sampling.get("n", 1)
    check_listed_of_answers(sampling, answers, "sampling.")
    wanted = sampling.get("prompt_logprobs")
    check_prompt_logprobs("sampling.prompt_logprobs", num_token_ids, wanted, limits, answers)


def _prompt(
    message: GenerationMessage, served: ServedModel
) -> tuple[str | None, tuple[int, ...] | None, ChatPrompt | None]:
    """The one of the three that was sent."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", "send text, token_ids or chat")
    if kind != "text" and message.apply_chat_template:
        raise RequestError(
            "apply_chat_template", f"cannot be applied to {kind}", "send the prompt as text or leave it out"
        )
    if kind == "chat":
        return None, None, to_chat_prompt(message.chat)
    if kind == "text":
        if not message.text:
            raise RequestError("text", "the prompt is empty", "send at least one character")
        return message.text, None, None
    token_ids = tuple(message.token_ids.ids)
    if not token_ids:
        raise RequestError("token_ids", "the prompt is empty", "send at least one token id")
    return None, token_ids, None


def _speculation(speculation: pb.SpeculationParameters, served: ServedModel) -> tuple[bool, int | None]:
    enabled = speculation.enabled if speculation.HasField("enabled") else True
    if not speculation.HasField("num_speculative_tokens"):
        return enabled, None
    wanted = speculation.num_speculative_tokens
    check_num_speculative_tokens(wanted, enabled=enabled, most=served.num_speculative_tokens)
    return enabled, wanted


def _verification(message: GenerationMessage) -> str | None:
    asked = message.speculation.verification
    if asked not in VERIFICATIONS:
        raise RequestError(
            "speculation.verification",
            f"{asked} is not known here",
            "send VERIFICATION_REJECTION, VERIFICATION_BLOCK or VERIFICATION_COUPLED, or leave it out",
        )
    chosen = VERIFICATIONS[asked]
    if message.sampling.HasField("structured_outputs"):
        check_verification_under_grammar("sampling.structured_outputs", chosen)
    return chosen


def _adapter(message: GenerationMessage, served: ServedModel) -> str | None:
    if not message.HasField("adapter"):
        return None
    if served.adapters is not None and message.adapter not in served.adapters:
        raise unknown_adapter("adapter", message.adapter, served.adapters)
    return str(message.adapter)


def _cache_salt(message: GenerationMessage) -> str | None:
    if not message.HasField("cache_salt"):
        return None
    if not 1 <= len(message.cache_salt) <= MAX_CACHE_SALT:
        problem = f"{len(message.cache_salt)} characters are no salt"
        raise RequestError("cache_salt", problem, f"send 1 to {MAX_CACHE_SALT} characters, or leave it out")
    return str(message.cache_salt)


def _deadline(message: GenerationMessage, limits: LimitsConfig, clock: Callable[[], float]) -> Deadline:
    if not message.HasField("timeout_ms"):
        return Deadline.after(limits.default_timeout_s, clock)
    if message.timeout_ms == 0:
        raise RequestError("timeout_ms", "0 leaves no time to answer", "send 1 or more, or leave it out")
    check_timeout("timeout_ms", message.timeout_ms, limits)
    return Deadline.after(message.timeout_ms / 1000, clock)


def to_sampling(sampling: pb.SamplingParameters, limits: LimitsConfig) -> dict[str, Any]:
    """Keyword arguments for the fields the client set, and those that have a default of the deployment's. Whether token
    ids are in the vocabulary the target knows.

    Raises RequestError naming the first field that is wrong.
    """
    _check_listed(sampling, limits)
    chosen: dict[str, Any] = {}
    for name in RANGES:
        if sampling.HasField(name):
            chosen[name] = value = getattr(sampling, name)
            check_range(f"sampling.{name}", name, value)
    for name, (allowed, description) in _RANGES.items():
        if sampling.HasField(name):
            chosen[name] = value = getattr(sampling, name)
            if not allowed(value):  # NaN compares false with everything, so it is refused too
                raise RequestError(f"sampling.{name}", f"{value} is out of range", f"send {description}")
    chosen.update({name: getattr(sampling, name) for name in _UNRANGED if sampling.HasField(name)})
    for name in _TEXTS:
        if texts := list(getattr(sampling, name)):
            if not all(texts):
                raise RequestError(f"sampling.{name}", "contains an empty string", "remove it")
            chosen[name] = texts
    for name in _TOKEN_IDS:
        if token_ids := list(getattr(sampling, name)):
            chosen[name] = token_ids
    if sampling.logit_bias:
        chosen["logit_bias"] = _logit_bias(sampling)
    if sampling.HasField("structured_outputs"):
        chosen["structured_outputs"] = _structured_outputs(sampling.structured_outputs)
    if "max_tokens" in chosen:
        check_max_tokens("sampling.max_tokens", chosen["max_tokens"], limits)
    elif limits.unasked_max_tokens is not None:
        chosen["max_tokens"] = limits.unasked_max_tokens
    _check_combinations(chosen)
    return chosen


def _check_listed(sampling: pb.SamplingParameters, limits: LimitsConfig) -> None:
    """Before any of it is copied. Raises RequestError."""
    for name, most, most_chars in (
        ("stop", limits.max_stop_strings, limits.max_stop_string_chars),
        ("bad_words", limits.max_bad_words, limits.max_bad_word_chars),
        ("stop_token_ids", limits.max_listed_token_ids, None),
        ("logit_bias", limits.max_listed_token_ids, None),
    ):
        check_list(f"sampling.{name}", getattr(sampling, name), most, most_chars)


def _logit_bias(sampling: pb.SamplingParameters) -> dict[int, float]:
    field = "sampling.logit_bias"
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise RequestError(field, f"{bias} for token {token_id} is out of range", "send numbers from -100 to 100")
    return dict(sampling.logit_bias)


def _structured_outputs(constraint: pb.StructuredOutputs) -> dict[str, Any]:
    """One keyword argument of vLLM's StructuredOutputsParams."""
    field, kind = "sampling.structured_outputs", constraint.WhichOneof("constraint")
    if kind is None:
        raise RequestError(field, "has no constraint", "send json, json_object, regex, grammar or choice")
    field = f"{field}.{kind}"
    if kind == "choice":
        if not constraint.choice.values:
            raise RequestError(field, "there is nothing to choose from", "send at least one value")
        return {kind: list(constraint.choice.values)}
    value = getattr(constraint, kind)
    if kind == "json":
        _check_schema(field, value)
    if kind == "json_object" and not value:
        raise RequestError(field, "false is no constraint", "send true or leave sampling.structured_outputs out")
    if kind == "grammar" and not value.strip():
        raise RequestError(field, "the grammar is empty", "send a grammar in EBNF or Lark")
    if kind == "regex" and "\0" in value:
        raise RequestError(field, "contains a NUL character", "remove it")
    return {kind: value}


def _check_schema(field: str, schema: str) -> None:
    """One that is too long is the target's to refuse, unread."""
    if len(schema) > MAX_CONSTRAINT_BYTES:
        return
    try:
        is_object = isinstance(json.loads(schema), dict)
    except ValueError as error:
        raise RequestError(field, f"is not JSON: {error}", "send a JSON schema as text") from None
    except RecursionError:
        raise RequestError(field, "is nested too deeply", "send a schema of at most 64 levels") from None
    if not is_object:
        raise RequestError(field, "is not a JSON object", 'send a schema such as {"type": "object"}')


def _check_combinations(chosen: dict[str, Any]) -> None:
    n, seed = chosen.get("n", 1), chosen.get("seed", 0)
    if chosen.get("min_tokens", 0) > chosen.get("max_tokens", math.inf):
        raise RequestError(
            "sampling.min_tokens",
            f"{chosen['min_tokens']} is above max_tokens ({chosen['max_tokens']})",
            "lower min_tokens or raise sampling.max_tokens",
        )
    if n > 1 and chosen.get("temperature") == 0:
        raise RequestError(
            "sampling.n", f"{n} answers at temperature 0 would be the same", "send 1 or a temperature above 0"
        )
    check_seeds("sampling.seed", seed, n)


def to_chat_prompt(chat: pb.Chat) -> ChatPrompt:
    """Raises RequestError naming the first field that is wrong."""
    if not chat.messages:
        raise RequestError("chat.messages", "there are none", "send at least one message")
    for number, message in enumerate(chat.messages):
        if not message.role:
            raise RequestError(f"chat.messages[{number}].role", "is empty", "send a role such as user")
    continued = chat.continue_final_message
    if continued and chat.add_generation_prompt:
        raise RequestError(
            "chat.continue_final_message", "cannot go with add_generation_prompt", "leave one of the two out"
        )
    if continued and not chat.messages[-1].content:
        raise RequestError(
            "chat.continue_final_message", "there is nothing to go on with: the last message is empty", "leave it out"
        )
    return ChatPrompt(
        tuple(
            ChatMessage(message.role, message.content, message.name if message.HasField("name") else None)
            for message in chat.messages
        ),
        # Whoever continues a message need not switch off what is on by default.
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued,
        continue_final_message=continued,
        template_kwargs=_template_kwargs(chat.chat_template_kwargs),
    )


def _template_kwargs(struct: struct_pb2.Struct) -> dict[str, Any]:
    field = "chat.chat_template_kwargs"
    check_template_variables(field, struct.fields, "chat.")
    variables = {name: _plain(value, f"{field}.{name}", MAX_TEMPLATE_DEPTH) for name, value in struct.fields.items()}
    check_template_lists(field, variables)
    return variables


def _plain(value: struct_pb2.Value, field: str, depth: int) -> Any:
    """JSON, where a number without a fraction is an integer: a Struct knows floating point only."""
    if depth == 0:
        raise RequestError(field, "is nested too deeply", f"send at most {MAX_TEMPLATE_DEPTH} levels")
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _plain(inner, field, depth - 1) for name, inner in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(inner, field, depth - 1) for inner in value.list_value.values]
    if kind == "number_value":
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return None if kind in (None, "null_value") else getattr(value, kind)


def to_tokenize_request(message: pb.TokenizeRequest, limits: LimitsConfig) -> TokenizeRequest:
    """Raises RequestError."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", "send text or chat")
    _check_chars(message, most_to_tokenize(limits.max_tokenize_chars, token_strs=message.return_token_strs))
    return TokenizeRequest(
        text=message.text if kind == "text" else None,
        chat=to_chat_prompt(message.chat) if kind == "chat" else None,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else None,
        return_token_strs=message.return_token_strs,
    )


def to_token_ids(message: pb.DetokenizeRequest, limits: LimitsConfig) -> tuple[int, ...]:
    """Raises RequestError."""
    check_list("token_ids", message.token_ids, limits.max_detokenize_ids)
    return tuple(message.token_ids)
