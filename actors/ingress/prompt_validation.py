"""From public chat and tokenising messages to what a target replica takes, without a model at hand."""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2

from actors.generation import ChatMessage, ChatPrompt, RequestError
from actors.ingress.sampling_validation import check_vocabulary
from actors.tokenization import TokenizeRequest
from outrider.v1 import generation_pb2 as pb

MAX_TEMPLATE_DEPTH = 32

_OWN_FIELDS = ("add_generation_prompt", "continue_final_message")
_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Arguments of a tokenizer's apply_chat_template that are no variables of the template."""


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


def to_tokenize_request(message: pb.TokenizeRequest) -> TokenizeRequest:
    """Raises RequestError."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError("prompt", "is missing", "send text or chat")
    return TokenizeRequest(
        text=message.text if kind == "text" else None,
        chat=to_chat_prompt(message.chat) if kind == "chat" else None,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else None,
        return_token_strs=message.return_token_strs,
    )


def to_token_ids(message: pb.DetokenizeRequest, vocab_size: int | None) -> tuple[int, ...]:
    """Raises RequestError."""
    check_vocabulary("token_ids", message.token_ids, vocab_size)
    return tuple(message.token_ids)


def _template_kwargs(struct: struct_pb2.Struct) -> dict[str, Any]:
    field = "chat.chat_template_kwargs"
    for name in struct.fields:
        if name in _OWN_FIELDS:
            raise RequestError(f"{field}.{name}", "has a field of its own", f"send chat.{name}")
        if name in _RESERVED:
            raise RequestError(f"{field}.{name}", "is no variable of a template", "leave it out")
    return {name: _plain(value, f"{field}.{name}", MAX_TEMPLATE_DEPTH) for name, value in struct.fields.items()}


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
