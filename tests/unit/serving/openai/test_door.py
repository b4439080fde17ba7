import math

import pytest

from outrider.actors.replica_calls import Deadline, RequestError
from outrider.actors.serving.openai.door import MAX_ANSWERS, to_openai_request
from outrider.cluster.limits import LimitsConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def door(body, endpoint="chat", headers=(), k=4):
    return to_openai_request(
        endpoint, body, dict(headers), num_speculative_tokens=k, request_id="made", clock=lambda: 1000.0
    )


def refused(body, **options):
    with pytest.raises(RequestError) as caught:
        door(body, **options)
    return caught.value


def test_plain_request():
    request = door({**CHAT, "temperature": 0, "user": "me", "use_beam_search": False, "top_p": None})
    assert request.endpoint == "chat"
    assert request.body == {**CHAT, "temperature": 0}
    assert request.request_id == "made"
    assert request.round_options == {}
    assert request.deadline == Deadline(4600.0)


def test_request_id_is_the_bodys_then_the_headers():
    headers = {"x-request-id": "header"}
    assert door(CHAT, headers=headers).request_id == "header"
    request = door({**CHAT, "request_id": "body"}, headers=headers)
    assert request.request_id == "body"
    assert "request_id" not in request.body


@pytest.mark.parametrize("value", ["", "a b", "é", "x" * 129, 5, ["a"]])
def test_bad_request_id(value):
    assert refused({**CHAT, "request_id": value}).field == "request_id"


def test_trace_headers_are_passed_on():
    headers = {"traceparent": "00-1-2-01", "authorization": "Bearer secret"}
    assert door(CHAT, headers=headers).trace_headers == {"traceparent": "00-1-2-01"}


def test_deadline():
    assert door(CHAT, headers={"x-request-timeout-ms": "1500"}).deadline == Deadline(1001.5)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "soon", "9" * 12, "9" * 400, "²"])
def test_bad_deadline(value):
    assert refused(CHAT, headers={"x-request-timeout-ms": value}).field == "x-request-timeout-ms"


@pytest.mark.parametrize(
    ("speculation", "options"),
    [
        ({}, {}),
        (None, {}),
        ({"enabled": None}, {}),
        ({"enabled": True}, {}),
        ({"enabled": False}, {"num_speculative_tokens": 0}),
        ({"num_speculative_tokens": 4}, {"num_speculative_tokens": 4}),
        ({"verification": "block"}, {"verification": "block"}),
        (
            {"enabled": False, "verification": "coupled"},
            {"num_speculative_tokens": 0, "verification": "coupled"},
        ),
    ],
)
def test_speculation(speculation, options):
    request = door({**CHAT, "speculation": speculation})
    assert request.round_options == options
    assert "speculation" not in request.body


@pytest.mark.parametrize(
    ("speculation", "k", "field"),
    [
        (7, 4, "speculation"),
        ({"enable": True}, 4, "speculation.enable"),
        ({"enabled": "yes"}, 4, "speculation.enabled"),
        ({"enabled": 0}, 4, "speculation.enabled"),
        ({"num_speculative_tokens": 0}, 4, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": 5}, 4, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": True}, 4, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": 1.0}, 4, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, 4, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": 1}, 0, "speculation.num_speculative_tokens"),
        ({"num_speculative_tokens": 1, "enabled": False}, 4, "speculation.num_speculative_tokens"),
        ({"verification": "greedy"}, 4, "speculation.verification"),
        ({"verification": ["block"]}, 4, "speculation.verification"),
    ],
)
def test_bad_speculation(speculation, k, field):
    assert refused({**CHAT, "speculation": speculation}, k=k).field == field


@pytest.mark.parametrize(
    "constraint",
    [{"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}],
)
def test_a_grammar_allows_coupled_only(constraint):
    body = {**CHAT, **constraint}
    assert refused({**body, "speculation": {"verification": "block"}}).field == "speculation.verification"
    assert door({**body, "speculation": {"verification": "coupled"}}).round_options == {"verification": "coupled"}


def test_format_text_is_no_grammar():
    door({**CHAT, "response_format": {"type": "text"}, "speculation": {"verification": "block"}})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n": 65}, "n"),
        ({"n": "65"}, "n"),
        ({"n": 0}, "n"),
        ({"repetition_detection": {"max_pattern_size": 65, "min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 64, "min_count": 9}}, "repetition_detection.min_count"),
        ({"repetition_detection": {"max_pattern_size": "4000"}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 4000.0}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"min_count": True}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"max_pattern_size": -10, "min_count": -100}},
            "repetition_detection.max_pattern_size",
        ),
        ({"max_tokens": 1e300}, "max_tokens"),
        ({"n": 1e300}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"repetition_penalty": 1e30}, "repetition_penalty"),
        ({"n": 3, "seed": -2}, "seed"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"guided_json": {}}, "guided_json"),
        ({"vllm_xargs": {"outrider": "x"}}, "vllm_xargs"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
    ],
)
def test_refused(changes, field):
    assert refused({**CHAT, **changes}).field.startswith(field)


def test_few_answers_with_tools_are_streamed_at_once():
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {**CHAT, "stream": True, "tools": tools, "n": 9}
    assert refused(body).field == "n"
    for other in ({"n": 8}, {"stream": False}, {"tools": []}):
        door({**body, **other})


def test_echo_of_several_answers_is_not_streamed():
    body = {"prompt": "a", "echo": True, "stream": True, "n": 2}
    assert refused(body, endpoint="completions").field == "echo"
    for name in body.keys() - {"prompt"}:
        door({key: value for key, value in body.items() if key != name}, endpoint="completions")
    door({**CHAT, "echo": True, "stream": True, "n": 2})


def test_types_are_left_to_vllm_but_for_numbers_that_have_bounds_here():
    assert door({**CHAT, "top_p": "hot"}).body["top_p"] == "hot"
    assert refused({**CHAT, "n": "3"}).field == "n"


def test_repetitions_are_looked_for_within_limits():
    for asked in (
        {"max_pattern_size": 64, "min_count": 8},
        {"max_pattern_size": 1, "min_count": 512},
        {"max_pattern_size": None, "min_count": 9_000},  # off
    ):
        assert door({**CHAT, "repetition_detection": asked}).body["repetition_detection"] == asked
    crossed = {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}
    assert refused({**CHAT, "repetition_detection": crossed}).field == "repetition_detection.min_pattern_size"


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": ["hi"]}, "content.0"),
        ({"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text"}]}, "content.1.text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content.0.text"),
        ({"role": "user", "content": [{"type": "sound"}]}, "content.0.type"),
        ({"role": "user", "content": [{"text": "hi"}]}, "content.0.type"),
        ({"role": "user", "content": [{"type": ["text"], "text": "hi"}]}, "content.0.type"),
        ({"role": "user", "content": [{"type": 0, "text": "hi"}]}, "content.0.type"),
    ],
)
def test_a_message_is_refused_by_the_path_of_what_is_wrong_in_it(message, field):
    assert refused({"messages": [USER, message]}).field == f"messages.1.{field}"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("endpoint", ["chat", "tokenize"])
@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({name: CALL[name] for name in ("type", "function")}, "id"),
        ({**CALL, "id": 3}, "id"),
        ({**CALL, "id": None}, "id"),
        ({**CALL, "type": "custom"}, "type"),
        ({"id": "c", "function": CALL["function"]}, "type"),
        ({"id": "c", "type": "function"}, "function"),
        ({**CALL, "function": None}, "function"),
        ({**CALL, "function": {"arguments": "{}"}}, "function.name"),
        ({**CALL, "function": {"name": 5, "arguments": "{}"}}, "function.name"),
        ({**CALL, "function": {"name": "f"}}, "function.arguments"),
        ({**CALL, "function": {"name": "f", "arguments": {}}}, "function.arguments"),
    ],
)
def test_a_call_in_a_message_is_refused_by_its_path(call, field, endpoint):
    message = {"role": "assistant", "tool_calls": [CALL, call]}
    assert refused({"messages": [USER, message]}, endpoint=endpoint).field == f"messages.1.tool_calls.1.{field}"


@pytest.mark.parametrize("endpoint", ["chat", "tokenize", "responses"])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("[" * 129 + "]" * 129, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "holds too large a number"),
        ('{"a": "\\ud800"}', "holds half of a surrogate pair"),
    ],
)
def test_arguments_that_nobody_can_decode_are_refused_by_their_path(arguments, problem, endpoint):
    """vLLM's renderer would fail at them: a fault of the server's."""
    message = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": arguments}}]}
    body, field = {"messages": [USER, message]}, "messages.1.tool_calls.0.function.arguments"
    if endpoint == "responses":
        called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        body, field = {"input": [USER, called]}, "input.1.arguments"
    error = refused(body, endpoint=endpoint)
    assert (error.field, error.problem) == (field, problem)


@pytest.mark.parametrize(
    "arguments", ["", "{", "5", '["a"]', "[" * 128 + "]" * 128, '{"a": "\\ud83d\\ude00", "b": 1e400}']
)
def test_other_arguments_are_taken_and_be_it_as_none(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    assert door(body).body == body


@pytest.mark.parametrize("bias", ["NaN", "Infinity", "-inf", "5", math.nan, math.inf, -math.inf, None, [1]])
def test_a_bias_is_a_finite_number(bias):
    assert refused({**CHAT, "logit_bias": {"5": 1, "6": bias}}).field == "logit_bias"
    assert door({**CHAT, "logit_bias": {"5": 101, "6": -0.5}}).body["logit_bias"] == {"5": 101, "6": -0.5}


def test_parts_and_calls_of_messages_are_taken():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "c"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [CALL]}]}
    assert door(body).body == body


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_there_is_one_constraint(changes, field):
    assert refused({**CHAT, **changes}).field == field


def test_a_format_of_text_is_no_constraint():
    door({**CHAT, "structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}})


def test_no_number_stands_for_all_of_the_vocabulary():
    assert refused({"prompt": "hi", "logprobs": -1}, endpoint="completions").field == "logprobs"
    for name in ("top_logprobs", "prompt_logprobs"):
        assert refused({**CHAT, "logprobs": True, name: -1}).field == name
    response = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": -9}
    assert refused(response, endpoint="responses").field == "top_logprobs"


def test_a_prompt_beside_messages_is_not_dropped():
    assert refused({**CHAT, "prompt": "hi"}, endpoint="tokenize").field == "prompt"


@pytest.mark.parametrize("name", ["messages", "self", "tokenizer", "tokenize", "add_generation_prompt"])
def test_what_is_no_variable_of_a_template_is_refused_by_name(name):
    for endpoint, body in (("chat", CHAT), ("tokenize", CHAT), ("responses", {"input": "hi"})):
        error = refused({**body, "chat_template_kwargs": {"enable_thinking": False, name: 1}}, endpoint=endpoint)
        assert error.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_a_tokenizer_reads_of_a_template_s_variables_is_lists_of_objects(name):
    for endpoint, body in (("chat", CHAT), ("tokenize", CHAT), ("responses", {"input": "hi"})):
        for wrong in (5, "x", {"a": 1}, ["x"]):
            error = refused({**body, "chat_template_kwargs": {name: wrong}}, endpoint=endpoint)
            assert error.field == f"chat_template_kwargs.{name}"
        door({**body, "chat_template_kwargs": {name: [{"a": 1}]}}, endpoint=endpoint)


def test_answers_of_one_request_are_limited():
    body = {"prompt": ["a"] * MAX_ANSWERS}
    assert door(body, endpoint="completions").body == body
    assert refused({**body, "n": 2}, endpoint="completions").field == "prompt"
    door({"prompt": [1] * 2 * MAX_ANSWERS}, endpoint="completions")  # one prompt of so many ids


def test_a_long_text_is_not_tokenized():
    most = LimitsConfig().max_tokenize_chars
    longest = "x" * most
    assert door({"prompt": longest}, endpoint="tokenize").body["prompt"] == longest
    error = refused({"prompt": longest + "y"}, endpoint="tokenize")
    assert (error.field, error.problem) == ("prompt", f"has {most + 1} characters")
    parts = [{"type": "text", "text": longest}]
    assert refused({"messages": [{"role": "user", "content": parts}]}, endpoint="tokenize").field == "messages"
