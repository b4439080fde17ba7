"""What the Python client sends: every option in its field, and what cannot be sent refused by name."""

from __future__ import annotations

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError, build_request
from outrider.v1 import generation_pb2 as pb
from tests.unit.scripted_service import ScriptedService


def test_only_given_options_are_sent(client: OutriderClient, service: ScriptedService) -> None:
    client.generate("hi", temperature=0.0, top_p=None, stop="END", speculation=False, logit_bias={5: 1.0})
    sampling = pb.SamplingParameters(temperature=0.0, stop=["END"], logit_bias={5: 1.0})
    assert service.requests == [
        pb.GenerateRequest(text="hi", sampling=sampling, speculation=pb.SpeculationParameters(enabled=False))
    ]


def test_every_option_reaches_the_field_of_its_name() -> None:
    request = build_request(
        pb.GenerateStreamRequest(),
        [1, 2],
        {
            "request_id": "r",
            "model": "m",
            "apply_chat_template": False,
            "top_k": -1,
            "stop": ["a", "b"],
            "stop_token_ids": [3],
            "num_speculative_tokens": 2,
            "verification": "coupled",
            "timeout_s": 0.0001,
            "n": 3,
            "logprobs": 0,
            "prompt_logprobs": 5,
            "allowed_token_ids": [4, 5],
            "bad_words": "word",
        },
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert request.WhichOneof("prompt") == "token_ids"
    assert (request.request_id, request.model, request.HasField("apply_chat_template")) == ("r", "m", True)
    assert request.sampling == pb.SamplingParameters(
        top_k=-1,
        stop=["a", "b"],
        stop_token_ids=[3],
        n=3,
        logprobs=0,
        prompt_logprobs=5,
        allowed_token_ids=[4, 5],
        bad_words=["word"],
    )
    assert request.speculation.verification == pb.VERIFICATION_COUPLED
    assert request.speculation.num_speculative_tokens == 2
    assert not request.speculation.HasField("enabled")
    assert request.timeout_ms == 1, "a timeout below a millisecond must not become none at all"


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"json_schema": '{"type": "object"}'}, pb.StructuredOutputs(json='{"type": "object"}')),
        ({"json_schema": {"type": "object"}}, pb.StructuredOutputs(json='{"type": "object"}')),
        ({"json_object": True}, pb.StructuredOutputs(json_object=True)),
        ({"regex": "a+"}, pb.StructuredOutputs(regex="a+")),
        ({"grammar": 'root ::= "a"'}, pb.StructuredOutputs(grammar='root ::= "a"')),
        ({"choice": ["a", "b"]}, pb.StructuredOutputs(choice=pb.Choices(values=["a", "b"]))),
        ({"choice": []}, pb.StructuredOutputs(choice=pb.Choices())),
    ],
)
def test_a_constraint_becomes_structured_outputs(options: dict, constraint: pb.StructuredOutputs) -> None:
    request = build_request(pb.GenerateRequest(), "x", options)
    assert request.sampling == pb.SamplingParameters(structured_outputs=constraint)


def test_an_empty_prompt_of_ids_is_still_a_prompt_of_ids() -> None:
    assert build_request(pb.GenerateRequest(), [], {}).WhichOneof("prompt") == "token_ids"


def test_the_timeout_goes_into_the_call_and_into_the_request(client: OutriderClient, service: ScriptedService) -> None:
    client.generate("hi", timeout_s=30.0)
    assert service.requests[0].timeout_ms == 30_000
    assert service.deadline_s is not None
    # gRPC rounds a deadline to its own clock: a few microseconds more than asked for are possible.
    assert service.deadline_s == pytest.approx(30.0, abs=5.0)
    list(client.stream("hi"))
    assert service.deadline_s is None
    assert not service.requests[1].HasField("timeout_ms")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"seed": 2**63}, "sampling.seed"),
        ({"top_k": 2.5}, "sampling.top_k"),
        ({"stop": [1]}, "sampling.stop"),
        ({"num_speculative_tokens": -1}, "speculation.num_speculative_tokens"),
        ({"n": -1}, "sampling.n"),
        ({"temperature": [1.0]}, "sampling.temperature"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids"),
        ({"verification": "greedy"}, "speculation.verification"),
        ({"json_schema": {"type": {1}}}, "sampling.structured_outputs.json"),
        ({"choice": "abc"}, "sampling.structured_outputs.choice"),
        ({"regex": "a", "choice": ["a"]}, "sampling.structured_outputs"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(client: OutriderClient, options: dict, field: str) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("hi", **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(("prompt", "field"), [("\udcff", "text"), ([-1], "token_ids"), ([2**32], "token_ids")])
def test_a_prompt_that_cannot_be_sent_is_refused_by_name(prompt: str | list[int], field: str) -> None:
    with pytest.raises(OutriderError, match=f"INVALID_ARGUMENT: {field}: "):
        build_request(pb.GenerateRequest(), prompt, {})


def test_an_unknown_option_is_a_mistake_of_the_caller(client: OutriderClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("hi", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="structured_outputs"):
        client.generate("hi", structured_outputs={"regex": "a"})  # type: ignore[call-arg]


CONVERSATION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello!", "name": "Ann"}]


def test_a_conversation_is_sent_as_it_is(client: OutriderClient, service: ScriptedService) -> None:
    kwargs = {"enable_thinking": False, "depth": 2, "tags": ["a"]}
    assert client.chat(CONVERSATION, max_tokens=3, add_generation_prompt=True, chat_template_kwargs=kwargs).text
    (request,) = service.requests
    assert request.WhichOneof("prompt") == "chat"
    assert [(m.role, m.content, m.HasField("name")) for m in request.chat.messages] == [
        ("system", "Be short.", False),
        ("user", "Hello!", True),
    ]
    assert request.chat.add_generation_prompt is True
    assert not request.chat.HasField("continue_final_message")
    assert dict(request.chat.chat_template_kwargs.items())["enable_thinking"] is False
    assert request.sampling == pb.SamplingParameters(max_tokens=3)
    messages = [pb.ChatMessage(role="user", content="hi"), {"role": "assistant", "content": "yes", "name": None}]
    assert [m.text_delta for m in client.stream_chat(messages, continue_final_message=True)] == ["one ", "two"]
    assert service.requests[1].chat == pb.Chat(
        messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", content="yes")],
        continue_final_message=True,
    )


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ("hello", {}, "chat.messages"),
        ({"role": "user", "content": "x"}, {}, "chat.messages"),
        (["hello"], {}, "chat.messages[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "chat.messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": 1}], {}, "chat.messages[1].role"),
        ([{"role": "user", "content": "x", "tool_calls": []}], {}, "chat.messages[0].tool_calls"),
        (CONVERSATION, {"chat_template_kwargs": {"x": object()}}, "chat.chat_template_kwargs"),
        (CONVERSATION, {"add_generation_prompt": "yes"}, "chat.add_generation_prompt"),
    ],
)
def test_a_conversation_that_cannot_be_sent_is_refused_by_name(
    client: OutriderClient, messages: list, options: dict, field: str
) -> None:
    with pytest.raises(OutriderError) as caught:
        client.chat(messages, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.field_violations] == [field]


def test_options_of_the_template_are_no_options_of_a_text(client: OutriderClient) -> None:
    with pytest.raises(TypeError, match="add_generation_prompt"):
        client.generate("hi", add_generation_prompt=True)  # type: ignore[call-arg]


def test_everything_else_the_api_has(client: OutriderClient, service: ScriptedService) -> None:
    assert list(client.tokenize("a b", add_special_tokens=False, return_token_strs=True, model="pair").token_ids) == [
        1,
        2,
    ]
    client.tokenize(CONVERSATION, continue_final_message=True)
    assert client.detokenize([1, 2], skip_special_tokens=True).text == "text"
    assert service.requests[0] == pb.TokenizeRequest(
        text="a b", add_special_tokens=False, return_token_strs=True, model="pair"
    )
    assert len(service.requests[1].chat.messages) == 2
    assert service.requests[1].chat.continue_final_message is True
    assert service.requests[2] == pb.DetokenizeRequest(token_ids=[1, 2], skip_special_tokens=True)
    assert client.abort("r-running") is True
    assert client.abort("r-over") is False
    assert client.model_info().vocab_size == 300
    assert client.server_info().outrider_version == "0.1.0"


def test_every_sampling_parameter_is_an_option() -> None:
    from outrider.deploy.client.request import GenerationOptions

    fields = {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields} - {"structured_outputs"}
    assert fields <= set(GenerationOptions.__annotations__)
