"""The field of an error by the name that the client sent it under."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.actors.openai_calls import Endpoint, OpenAIRequest
from outrider.actors.serving.openai.blamed import by_its_name
from outrider.actors.serving.openai.errors import HttpFailure

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def blamed(endpoint: Endpoint, body: dict[str, Any], message: str, param: str | None = None) -> HttpFailure:
    return by_its_name(HttpFailure(400, message, param), OpenAIRequest(endpoint, "r", body))


@pytest.mark.parametrize(
    ("endpoint", "body", "message", "param", "sent"),
    [
        ("chat", CHAT, "The decoder prompt cannot be empty", None, "messages"),
        ("completions", {"prompt": [9]}, "Token id 9 is out of vocabulary", None, "prompt"),
        ("completions", {"prompt": "a", "n": 2}, "n must be 1 when using greedy sampling, got 2", None, "n"),
        ("chat", {**CHAT, "stop": ""}, "stop cannot contain an empty string", None, "stop"),
        ("chat", {**CHAT, "top_k": -2}, "to vLLM top_k is wrong", None, "top_k"),
        ("chat", {**CHAT, "user": "u", "model": "m"}, "What a user says of a model", None, None),
        ("chat", {**CHAT, "tools": [1]}, "Set both `tools` and `n`", None, "tools"),
        ("chat", CHAT, "This is 9 tokens long", "input_tokens", "messages"),
        ("responses", {"input": "a"}, "This is 9 tokens long", "input_tokens", "input"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs of 21", "logprobs", "logprobs"),
        ("chat", {**CHAT, "logprobs": True, "top_logprobs": 21}, "logprobs of 21", "logprobs", "top_logprobs"),
        ("chat", {**CHAT, "logprobs": 5, "top_logprobs": 2}, "logprobs: is no flag", "logprobs", "logprobs"),
        (
            "chat",
            {**CHAT, "max_completion_tokens": 9},
            "max_tokens=9 is much",
            "max_tokens",
            "max_completion_tokens",
        ),
        ("chat", {**CHAT, "response_format": {}}, "does not compile", "structured_outputs.json", "response_format"),
        ("chat", {**CHAT, "structured_outputs": {}}, "is long", "structured_outputs.json", "structured_outputs.json"),
    ],
)
def test_it_is_one_that_was_sent(endpoint, body, message, param, sent):
    assert blamed(endpoint, body, message, param).param == sent


@pytest.mark.parametrize(("asked", "sent"), [(0, "max_tokens"), (1, "prompt"), (None, "prompt")])
def test_without_room_the_prompt_is_too_long(asked, sent):
    body = {"prompt": "a"} if asked is None else {"prompt": "a", "max_tokens": asked}
    failure = blamed("completions", body, "max_tokens must be at least 1, got 0", "max_tokens")
    assert failure.param == sent
    assert ("the prompt" in failure.message) == (sent == "prompt")


def test_a_value_is_not_said_again():
    failure = blamed("chat", {**CHAT, "stop": "a"}, "is wrong (parameter=stop, value=['a\n)'])", "stop")
    assert failure.message == "is wrong"
    assert blamed("chat", CHAT, "is wrong. (parameter=stop)").message == "is wrong"
    assert blamed("chat", CHAT, "is wrong (so far)").message == "is wrong (so far)"
