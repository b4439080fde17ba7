"""Chat and tokenising messages at the door."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2

from outrider.actors.replica_calls import ChatMessage, RequestError
from outrider.actors.serving.grpc.validation import (
    ServedModel,
    check_model,
    to_chat_prompt,
    to_generation_request,
    to_tokenize_request,
)
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb

SERVED = ServedModel("pair", 4)
LIMITS = LimitsConfig()


def chat(*said: tuple[str, str], **fields: Any) -> pb.Chat:
    kwargs = fields.pop("chat_template_kwargs", {})
    made = pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in said], **fields)
    made.chat_template_kwargs.update(kwargs)
    return made


def test_a_conversation_keeps_its_order_its_names_and_vllms_defaults() -> None:
    message = chat(("system", "Be brief."), ("user", ""))
    message.messages[1].name = "Ada"
    prompt = to_chat_prompt(message)
    assert prompt.messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "", "Ada"))
    assert (prompt.add_generation_prompt, prompt.continue_final_message, prompt.template_kwargs) == (True, False, {})


def test_who_continues_a_message_need_not_switch_the_generation_prompt_off() -> None:
    assert not to_chat_prompt(chat(("assistant", "So"), continue_final_message=True)).add_generation_prompt
    assert not to_chat_prompt(chat(("user", "a"), add_generation_prompt=False)).add_generation_prompt


def test_template_variables_are_plain_json() -> None:
    given = {"enable_thinking": False, "budget": 3, "share": 0.5, "none": None, "deep": {"list": [1, "a", {"b": 2}]}}
    made = to_chat_prompt(chat(("user", "a"), chat_template_kwargs=given)).template_kwargs
    assert made == given
    assert isinstance(made["budget"], int)
    assert isinstance(made["deep"]["list"][2]["b"], int)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (chat(), "chat.messages"),
        (chat(("user", "a"), ("", "b")), "chat.messages[1].role"),
        (chat(("user", "a"), continue_final_message=True, add_generation_prompt=True), "chat.continue_final_message"),
        (chat(("assistant", ""), continue_final_message=True), "chat.continue_final_message"),
        (
            chat(("user", "a"), chat_template_kwargs={"chat_template": "{{ 1 }}"}),
            "chat.chat_template_kwargs.chat_template",
        ),
        (chat(("user", "a"), chat_template_kwargs={"tokenize": True}), "chat.chat_template_kwargs.tokenize"),
        (chat(("user", "a"), chat_template_kwargs={"tools": 5}), "chat.chat_template_kwargs.tools"),
        (chat(("user", "a"), chat_template_kwargs={"documents": ["x"]}), "chat.chat_template_kwargs.documents"),
        (
            chat(("user", "a"), chat_template_kwargs={"add_generation_prompt": True}),
            "chat.chat_template_kwargs.add_generation_prompt",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_named(message: pb.Chat, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        to_chat_prompt(message)
    assert caught.value.field == field


def test_template_variables_have_a_depth() -> None:
    value = struct_pb2.Value(number_value=1)
    for _ in range(40):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    message = chat(("user", "a"))
    message.chat_template_kwargs.fields["deep"].CopyFrom(value)
    with pytest.raises(RequestError, match=r"chat\.chat_template_kwargs\.deep: is nested too deeply"):
        to_chat_prompt(message)


def test_a_request_may_be_a_conversation() -> None:
    request = pb.GenerateRequest(chat=chat(("user", "hi")))
    made = to_generation_request(request, SERVED, request_id="r")
    assert made.prompt_chat is not None
    assert (made.prompt_text, made.prompt_token_ids, made.prompt_chat.messages[0].content) == (None, None, "hi")
    request.apply_chat_template = True
    with pytest.raises(RequestError, match="apply_chat_template: cannot be applied to chat"):
        to_generation_request(request, SERVED, request_id="r")


def test_tokenizing_needs_a_prompt_which_may_be_empty_text() -> None:
    with pytest.raises(RequestError, match=r"^prompt: is missing"):
        to_tokenize_request(pb.TokenizeRequest(), LIMITS)
    made = to_tokenize_request(pb.TokenizeRequest(text=""), LIMITS)
    assert (made.text, made.chat, made.add_special_tokens) == ("", None, None)
    made = to_tokenize_request(pb.TokenizeRequest(chat=chat(("user", "a")), add_special_tokens=False), LIMITS)
    assert (made.text, made.add_special_tokens) == (None, False)


def test_a_long_text_is_not_tokenized() -> None:
    limits = LimitsConfig(max_tokenize_chars=2000)
    longest = "x" * 2000
    assert to_tokenize_request(pb.TokenizeRequest(text=longest), limits).text == longest
    with pytest.raises(RequestError, match=r"^text: has 2001 characters; send 2000 at most"):
        to_tokenize_request(pb.TokenizeRequest(text=longest + "y"), limits)
    rare = "\U00010000"  # four bytes, and up to four tokens
    assert to_tokenize_request(pb.TokenizeRequest(text=rare * 1000), limits).text == rare * 1000
    with pytest.raises(RequestError, match=r"^text: has 2002 characters"):
        to_tokenize_request(pb.TokenizeRequest(text=rare * 1001), limits)
    assert to_tokenize_request(pb.TokenizeRequest(text="x" * 250, return_token_strs=True), limits).return_token_strs
    with pytest.raises(RequestError, match=r"^text: has 251 characters; send 250 at most"):
        to_tokenize_request(pb.TokenizeRequest(text="x" * 251, return_token_strs=True), limits)
    with pytest.raises(RequestError, match=r"^chat: has 2009 characters"):
        to_tokenize_request(pb.TokenizeRequest(chat=chat(("user", longest), ("user", "y"))), limits)


@pytest.mark.parametrize("message", [pb.TokenizeRequest(model="x"), pb.DetokenizeRequest(model="x")])
def test_another_model_is_not_tokenized_for(message: Any) -> None:
    with pytest.raises(RequestError, match=r"^model: 'x' is not served here"):
        check_model(message, SERVED)
