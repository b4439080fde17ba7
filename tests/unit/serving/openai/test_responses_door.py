"""Bodies of ``/v1/responses``: what is refused by name, and what vLLM's class is given of the rest."""

import pytest

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.openai.door import to_openai_request
from outrider.cluster.limits import LimitsConfig

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def door(limits=None, **body):
    return to_openai_request(
        "responses", {"input": "hi", **body}, {}, num_speculative_tokens=4, request_id="made", limits=limits
    )


def items(*given):
    return door(input=list(given)).body["input"]


def said(role, text):
    return {"type": "message", "role": role, "content": text}


def answered(text, **status):
    return {**said("assistant", text), **status}


def test_plain_request():
    request = door(
        instructions="be",
        temperature=0,
        store=False,
        background=False,
        safety_identifier="me",
        tools=[TOOL],
        include=[],
    )
    assert request.body == {"input": "hi", "instructions": "be", "temperature": 0, "tools": [TOOL], "include": []}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": "a"}, said("user", "a")),
        ({**said("developer", [{"type": "input_text", "text": "a"}]), "status": "completed"}, said("developer", "a")),
        (said("user", [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]), said("user", "a\nb")),
        ({"role": "assistant", "content": "a"}, answered("a")),
        ({**said("assistant", []), "id": "msg_1", "phase": "final_answer"}, answered("")),
        (
            said("assistant", [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]),
            answered("a\nb"),
        ),
        ({**said("assistant", "a"), "status": "incomplete"}, answered("a", status="incomplete")),
        (
            {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "namespace": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
        ),
        (
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "s"}],
                "content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}],
                "encrypted_content": None,
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a\nb"}]},
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "s"}]},
        ),
    ],
)
def test_items(given, expected):
    assert items(given) == [expected]


def test_reasoning_that_says_nothing_is_left_out():
    assert items({"type": "reasoning", "id": "rs_1", "summary": []}, {"role": "user", "content": "a"}) == [
        said("user", "a")
    ]


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"background": True}, "background", "stored"),
        ({"store": True}, "store", "store: false"),
        ({"prompt": {"id": "p"}}, "prompt", "not stored"),
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input", "4096"),
        ({"input": {"role": "user"}}, "input", "no array"),
        ({"input": ["hi"]}, "input.0", "no object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "send the item itself"),
        ({"input": [{"id": "msg_1"}]}, "input.0.type", "send the item itself"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input.0.type", "web_search_call"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input.0.role", "wizard"),
        ({"input": [{"role": "user"}]}, "input.0.content", "is missing"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content", "no array"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.image_url",
            "takes no pictures",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text", "is missing"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input.0.colour", "no field"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", "is missing"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
            "input.0.arguments",
            "no text",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output", "is missing"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
            "not encrypted",
        ),
        *(
            ({"tools": [TOOL, {"type": kind}]}, "tools.1.type", kind)
            for kind in (
                "web_search",
                "code_interpreter",
                "file_search",
                "mcp",
                "computer",
                "image_generation",
                "namespace",
            )
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.type", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function", "no field"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools.0.format", "text"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "is missing"),
        ({"tools": TOOL}, "tools", "no array"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type", "allowed_tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function", "no field"),
        ({"tool_choice": {"type": []}}, "tool_choice.type", "not"),
        ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input.0.content.0.type", "input_text"),
        ({"include": ["file_search_call.results"]}, "include.0", "file_search_call.results"),
        ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "no answer"),
        ({"truncation": "auto"}, "truncation", "not cut"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"name": "s"}}}, "text.format.type", "is missing"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "no text"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema", "no JSON object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "OpenAI"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "not summarised"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "not padded"),
        ({"messages": []}, "messages", "no field"),
        (
            {"text": {"format": {"type": "json_object"}}, "speculation": {"verification": "block"}},
            "speculation.verification",
            "coupled",
        ),
    ],
)
def test_refused_by_name(body, field, says):
    with pytest.raises(RequestError, match=says) as caught:
        door(**body)
    assert caught.value.field == field


def test_limits_of_tokens():
    limits = LimitsConfig(greatest_max_tokens=64, default_max_tokens=32)
    assert door(limits).body["max_output_tokens"] == 32
    assert door(limits, max_output_tokens=8).body["max_output_tokens"] == 8
    with pytest.raises(RequestError) as caught:
        door(limits, max_output_tokens=65)
    assert caught.value.field == "max_output_tokens"


def test_what_is_counted_of_it():
    request = door(instructions="x" * 40, max_output_tokens=7, input=[said("user", "y" * 40)])
    assert (request.num_answers, request.max_tokens, request.prompt_tokens) == (1, 7, 20)
