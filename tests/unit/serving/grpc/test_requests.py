"""Public messages become requests with what the client set, and only what nobody else checks is refused here."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.actors.replica_calls import ChatMessage, ChatPrompt, Deadline, GenerationRequest, RequestError
from outrider.actors.serving.grpc.requests import (
    ServedModel,
    request_id_of,
    to_generation_request,
    to_tokenize_request,
)
from outrider.cluster.config import ServingConfig
from outrider.v1 import generation_pb2 as pb

LIMITS = ServingConfig(default_timeout_s=60, greatest_timeout_s=600)
SERVED = ServedModel("pair", 4, LIMITS)
SAMPLING: dict[str, Any] = {
    "temperature": 0.0, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": -(2**63), "max_tokens": 9, "min_tokens": 0,
    "repetition_penalty": 1.1, "presence_penalty": -2.0, "frequency_penalty": 2.0, "ignore_eos": False,
    "stop": ["\n\n", "END"], "stop_token_ids": [0, 99], "logit_bias": {7: -100.0, 8: 1e300}, "n": 2000, "logprobs": 20,
    "prompt_logprobs": 0, "allowed_token_ids": [1, 2**32 - 1], "bad_words": ["a", ""], "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
}  # fmt: skip


def asked(**fields: Any) -> pb.GenerateRequest:
    prompt = {} if {"text", "token_ids", "chat"} & set(fields) else {"text": "x"}
    return pb.GenerateRequest(**prompt, **fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return asked(sampling=pb.SamplingParameters(**fields))


def speculated(**fields: Any) -> pb.GenerateRequest:
    return asked(speculation=pb.SpeculationParameters(**fields))


def chat(content: str = "hi", **fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content)], **fields)


def translated(message: Any, served: ServedModel = SERVED, grpc_timeout: str | None = None) -> GenerationRequest:
    return to_generation_request(message, served, request_id="r", grpc_timeout=grpc_timeout, clock=lambda: 1000.0)


def test_a_bare_prompt_sets_nothing_else() -> None:
    assert translated(asked()) == GenerationRequest("r", prompt_text="x", deadline=Deadline(1060.0))


def test_every_sampling_field_arrives_by_vllms_name_and_zero_counts_as_set() -> None:
    assert translated(sampled(**SAMPLING)).sampling == SAMPLING
    names = {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields}
    assert names == {*SAMPLING, "structured_outputs"}


@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.GenerateStreamRequest])
def test_every_other_field_arrives(kind: Any) -> None:
    speculation = pb.SpeculationParameters(enabled=False, num_speculative_tokens=4, verification=pb.VERIFICATION_BLOCK)
    more = {"model": "pair", "cache_salt": "s", "adapter": "tuned", "timeout_ms": 2500}
    message = kind(token_ids=pb.TokenIds(ids=[0, 9]), speculation=speculation, **more)
    assert translated(message) == GenerationRequest(
        "r", prompt_token_ids=(0, 9), speculation=False, num_speculative_tokens=4, verification="block",
        deadline=Deadline(1002.5), cache_salt="s", adapter="tuned",
    )  # fmt: skip


def test_a_conversation_arrives_with_whole_numbers_and_the_default_that_goes_with_it() -> None:
    message = chat()
    message.chat_template_kwargs.update({"a": 1, "b": [1.5, None, {"c": True}]})
    said = (ChatMessage("user", "hi"),)
    expected = ChatPrompt(said, template_kwargs={"a": 1, "b": [1.5, None, {"c": True}]})
    found = translated(asked(chat=message)).prompt_chat
    assert found == expected
    assert isinstance(found.template_kwargs["a"], int)
    continued = translated(asked(chat=chat(continue_final_message=True))).prompt_chat
    assert continued == ChatPrompt(said, add_generation_prompt=False, continue_final_message=True)
    assert to_tokenize_request(pb.TokenizeRequest(chat=message)).chat == expected


@pytest.mark.parametrize(
    ("timeout_ms", "grpc_timeout", "seconds"),
    [
        (None, None, 60.0),
        (None, "90S", 90.0),
        (None, "2H", 600.0),
        (1500, "90S", 1.5),
        (90_000, "1500m", 1.5),
        (0, None, 0.0),
        (None, "soon", 60.0),
    ],
)
def test_the_earlier_deadline_counts(timeout_ms: int | None, grpc_timeout: str | None, seconds: float) -> None:
    message = asked() if timeout_ms is None else asked(timeout_ms=timeout_ms)
    assert translated(message, grpc_timeout=grpc_timeout).deadline == Deadline(1000.0 + seconds)


def test_an_answer_that_is_not_limited_gets_the_deployments_limit() -> None:
    def max_tokens(**limits: Any) -> Any:
        return translated(asked(), ServedModel("pair", 4, ServingConfig(**limits))).sampling.get("max_tokens")

    assert max_tokens() is None
    assert max_tokens(default_max_tokens=7) == 7
    assert max_tokens(greatest_max_tokens=9) == 9
    assert max_tokens(default_max_tokens=7, greatest_max_tokens=9) == 7


BAD_KWARGS = chat()
BAD_KWARGS.chat_template_kwargs.update({"chat_template": "{{ 1 }}"})


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (asked(model="other"), "model"),
        (asked(token_ids=pb.TokenIds(ids=[1]), apply_chat_template=True), "apply_chat_template"),
        (asked(chat=pb.Chat()), "chat.messages"),
        (asked(chat=BAD_KWARGS), "chat.chat_template_kwargs.chat_template"),
        (asked(timeout_ms=600_001), "timeout_ms"),
        (sampled(max_tokens=10), "sampling.max_tokens"),
        (speculated(num_speculative_tokens=0), "speculation.num_speculative_tokens"),
        (speculated(num_speculative_tokens=5), "speculation.num_speculative_tokens"),
        (speculated(verification=99), "speculation.verification"),
    ],
)
def test_what_nobody_else_would_refuse_is_refused_by_name(message: Any, field: str) -> None:
    limits = ServingConfig(default_timeout_s=60, greatest_timeout_s=600, greatest_max_tokens=9)
    with pytest.raises(RequestError) as caught:
        translated(message, ServedModel("pair", 4, limits))
    assert caught.value.field == field
    assert caught.value.fix


def test_a_deployment_without_a_drafter_says_so() -> None:
    with pytest.raises(RequestError, match="no drafter"):
        translated(speculated(num_speculative_tokens=1), ServedModel("pair", 0))


@pytest.mark.parametrize("request_id", ["", "two words", "\u2603", "a\n", "x" * 129])
def test_an_id_that_cannot_travel_in_metadata_is_refused_without_being_repeated(request_id: str) -> None:
    for message in (asked(request_id=request_id), pb.AbortRequestRequest(request_id=request_id)):
        with pytest.raises(RequestError, match=r"^request_id: is not usable as an id"):
            request_id_of(message)
    assert request_id_of(asked(request_id="x" * 128)) == "x" * 128
    assert request_id_of(asked()) != request_id_of(asked()), "chosen by the server"
