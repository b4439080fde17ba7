"""Converts public request messages to what a target replica takes.

Only fields that the client set are passed on, so that the engine's defaults apply. The replica checks what vLLM, the
tokenizer or a grammar's backend can check (outrider.actors.vllm_adapter.engine_requests); the rest is checked here.
Every function raises RequestError with the public field that is wrong.
"""

from __future__ import annotations

import re
import time
import uuid
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
from outrider.actors.request_ids import is_usable_id
from outrider.cluster.config import ServingConfig
from outrider.v1 import generation_pb2 as pb

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest

VERIFICATIONS: dict[pb.Verification, str | None] = {
    pb.VERIFICATION_UNSPECIFIED: None,
    pb.VERIFICATION_REJECTION: "rejection",
    pb.VERIFICATION_BLOCK: "block",
    pb.VERIFICATION_COUPLED: "coupled",
}

# fmt: off
NO_TEMPLATE_VARIABLES = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "model_config", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer", "tokenizer_kwargs", "truncation",
})
# fmt: on
"""Arguments of the functions that apply a chat template: a client could replace the template or the result's type."""

_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True)
class ServedModel:
    """Describes the deployment, against which requests are checked."""

    name: str
    num_speculative_tokens: int
    """K; 0: served without a drafter."""

    limits: ServingConfig = field(default_factory=ServingConfig)


def request_id_of(message: GenerationMessage | pb.AbortRequestRequest) -> str:
    """Return the client's id, or a new one for a generation that brought none."""
    if isinstance(message, GenerationMessage) and not message.HasField("request_id"):
        return uuid.uuid4().hex
    if not is_usable_id(message.request_id):
        raise RequestError(
            "request_id", "is not usable as an id", "send 1 to 128 printable ASCII characters without spaces"
        )
    return message.request_id


def to_generation_request(
    message: GenerationMessage,
    served: ServedModel,
    *,
    request_id: str,
    grpc_timeout: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> GenerationRequest:
    """Check message and translate it. grpc_timeout: the call's own deadline, as HTTP/2's header ``grpc-timeout``."""
    check_model(message, served)
    kind = _prompt_kind(message, "send text, token_ids or chat")
    if kind != "text" and message.apply_chat_template:
        raise RequestError("apply_chat_template", f"cannot be applied to {kind}", "send text, or leave it out")
    return GenerationRequest(
        request_id=request_id,
        prompt_text=message.text if kind == "text" else None,
        prompt_token_ids=tuple(message.token_ids.ids) if kind == "token_ids" else None,
        prompt_chat=to_chat_prompt(message.chat) if kind == "chat" else None,
        apply_chat_template=message.apply_chat_template,
        sampling=to_sampling(message.sampling, served.limits),
        speculation=message.speculation.enabled if message.speculation.HasField("enabled") else True,
        num_speculative_tokens=_num_speculative_tokens(message.speculation, served.num_speculative_tokens),
        verification=_verification(message.speculation),
        deadline=_deadline(message, served.limits, grpc_timeout, clock),
        cache_salt=message.cache_salt or None,
        adapter=message.adapter if message.HasField("adapter") else None,
    )


def check_model(message: GenerationMessage | pb.TokenizeRequest | pb.DetokenizeRequest, served: ServedModel) -> None:
    """Refuse a request for another model."""
    if message.HasField("model") and message.model != served.name:
        raise RequestError("model", "is not the one that is served", f"send {served.name!r} or leave it out")


def to_sampling(sampling: pb.SamplingParameters, limits: ServingConfig) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams, whose names the message's fields have.

    max_tokens defaults to that of the limits, where they have one.
    """
    chosen: dict[str, Any] = {}
    for descriptor, value in sampling.ListFields():
        if descriptor.name == "structured_outputs":
            chosen[descriptor.name] = _structured_outputs(value)
        elif descriptor.is_repeated:
            chosen[descriptor.name] = dict(value) if descriptor.message_type is not None else list(value)
        else:
            chosen[descriptor.name] = value
    most = limits.greatest_max_tokens
    if "max_tokens" not in chosen:
        if limits.max_tokens_if_unset is not None:
            chosen["max_tokens"] = limits.max_tokens_if_unset
    elif most is not None and chosen["max_tokens"] > most:
        raise RequestError("sampling.max_tokens", f"is above serving.greatest_max_tokens, {most}", "lower it")
    return chosen


def to_chat_prompt(chat: pb.Chat) -> ChatPrompt:
    if not chat.messages:
        raise RequestError("chat.messages", "there are none", "send at least one message")
    for name in chat.chat_template_kwargs.fields:
        if name in NO_TEMPLATE_VARIABLES:
            raise RequestError(f"chat.chat_template_kwargs.{name}", "is no variable of a template", "leave it out")
    continues = chat.continue_final_message
    return ChatPrompt(
        tuple(
            ChatMessage(message.role, message.content, message.name if message.HasField("name") else None)
            for message in chat.messages
        ),
        # Whoever continues a message need not switch off what is on by default.
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues,
        continue_final_message=continues,
        template_kwargs={name: _plain(value) for name, value in chat.chat_template_kwargs.fields.items()},
    )


def to_tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    kind = _prompt_kind(message, "send text or chat")
    return TokenizeRequest(
        text=message.text if kind == "text" else None,
        chat=to_chat_prompt(message.chat) if kind == "chat" else None,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else None,
        return_token_strs=message.return_token_strs,
    )


def seconds_of(grpc_timeout: str) -> float | None:
    """Return the seconds of a ``grpc-timeout`` header; None for one that is none."""
    match = _GRPC_TIMEOUT.fullmatch(grpc_timeout)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


def _prompt_kind(message: GenerationMessage | pb.TokenizeRequest, fix: str) -> str:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", fix)
    return kind


def _num_speculative_tokens(speculation: pb.SpeculationParameters, most: int) -> int | None:
    if not speculation.HasField("num_speculative_tokens"):
        return None
    wanted = speculation.num_speculative_tokens
    if not 1 <= wanted <= most:
        fix = f"send 1 to {most}, or leave it out" if most else "leave it out: there is no drafter here"
        raise RequestError("speculation.num_speculative_tokens", f"{wanted} is out of range", fix)
    return wanted


def _verification(speculation: pb.SpeculationParameters) -> str | None:
    if speculation.verification not in VERIFICATIONS:
        raise RequestError("speculation.verification", f"{speculation.verification} is not known", "leave it out")
    return VERIFICATIONS[speculation.verification]


def _deadline(
    message: GenerationMessage, limits: ServingConfig, grpc_timeout: str | None, clock: Callable[[], float]
) -> Deadline:
    """Returns the earlier of the field's deadline and the call's; the default where there is neither."""
    most = limits.greatest_timeout_s
    of_call = None if grpc_timeout is None else seconds_of(grpc_timeout)
    seconds = limits.default_timeout_s if of_call is None else min(of_call, most)
    if message.HasField("timeout_ms"):
        if message.timeout_ms > 1000 * most:
            problem = f"is above serving.greatest_timeout_s, {most:g}"
            raise RequestError("timeout_ms", problem, f"send at most {int(1000 * most)}")
        seconds = message.timeout_ms / 1000 if of_call is None else min(seconds, message.timeout_ms / 1000)
    return Deadline.after(seconds, clock)


def _structured_outputs(constraint: pb.StructuredOutputs) -> dict[str, Any]:
    """Returns keyword arguments of vLLM's StructuredOutputsParams."""
    kind = constraint.WhichOneof("constraint")
    if kind is None:
        return {}
    return {kind: list(constraint.choice.values) if kind == "choice" else getattr(constraint, kind)}


def _plain(value: struct_pb2.Value) -> Any:
    """Returns JSON in which a number without a fraction is an integer: a Struct has floating point only."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _plain(inner) for name, inner in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(inner) for inner in value.list_value.values]
    if kind == "number_value":
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return None if kind in (None, "null_value") else getattr(value, kind)
