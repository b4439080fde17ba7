"""What vLLM's request models find wrong, as one sentence about one field."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.openai import schema
from outrider.actors.serving.openai.schema import openapi, validated

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return {"messages": MESSAGES, **fields}


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatCompletionRequest, {}, "messages"),
        (ChatCompletionRequest, chat(temperature="hot"), "temperature"),
        (ChatCompletionRequest, chat(logit_bias={"a": "b"}), "logit_bias.a"),
        (ChatCompletionRequest, chat(stop=["a"] * 9), "stop"),
        (ChatCompletionRequest, chat(seed=1.5), "seed"),
        (ChatCompletionRequest, chat(top_logprobs=3), "top_logprobs"),
        (ChatCompletionRequest, chat(stream_options={"include_usage": True}), "stream_options"),
        (ChatCompletionRequest, chat(tools=[]), "tools"),
        (ChatCompletionRequest, chat(response_format={"type": "json_schema"}), "response_format"),
        (ChatCompletionRequest, {"messages": [{"content": "hi"}]}, "messages.0.role"),
        (CompletionRequest, {"prompt": "a", "logprobs": "many"}, "logprobs"),
        (CompletionRequest, {"prompt": "a", "max_tokens": []}, "max_tokens"),
        (CompletionRequest, {"prompt": [1, -1]}, "prompt.1"),
        (CompletionRequest, {}, "prompt"),
        # What vLLM's validators fall over.
        (ChatCompletionRequest, chat(tools=[{"a": 1}], tool_choice={"function": {"name": "f"}}), "body"),
        (ChatCompletionRequest, chat(structured_outputs=5), "body"),
    ],
)
def test_names_the_field(kind, body, field):
    with pytest.raises(RequestError) as caught:
        validated(kind, body)
    assert caught.value.field == field
    assert len(str(caught.value)) < 700


def test_huge_values_are_not_repeated():
    with pytest.raises(RequestError) as caught:
        validated(CompletionRequest, {"prompt": "a", "temperature": "x" * 100_000})
    assert len(str(caught.value)) < 500


def test_openapi_has_what_is_taken():
    schemas = openapi("1")["components"]["schemas"]
    chat_schema = schemas["ChatCompletionRequest"]
    assert chat_schema["additionalProperties"] is False
    assert {"messages", "speculation", "user"} <= set(chat_schema["properties"])
    assert not {"use_beam_search", "vllm_xargs", "chat_template"} & set(chat_schema["properties"])
    text = str(openapi("1"))
    references = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["wrong"] * 10_000}, "stop_token_ids.0"),
        (CompletionRequest, {"prompt": ["x", *[[1.5]] * 1_000]}, "prompt"),
        (ChatCompletionRequest, chat(logit_bias=dict.fromkeys(map(str, range(10_000)), "wrong")), "logit_bias.0"),
    ],
)
def test_the_first_wrong_member_ends_it(kind, body, field, monkeypatch):
    """A million of them, each described, would take a gigabyte."""
    explain, described = schema._explain, []

    def count(error, body):
        described.append(error.error_count())
        return explain(error, body)

    monkeypatch.setattr(schema, "_explain", count)
    with pytest.raises(RequestError) as caught:
        validated(kind, body)
    assert caught.value.field.startswith(field)
    assert described[0] < 20
