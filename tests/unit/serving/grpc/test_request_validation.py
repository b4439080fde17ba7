"""Every rule a request can break at the door, and what a good request turns into."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.actors.replica_calls import Deadline, GenerationRequest, RequestError
from outrider.actors.serving.grpc.validation import GenerationMessage, ServedModel, to_generation_request
from outrider.v1 import generation_pb2 as pb

SERVED = ServedModel(name="pair", num_speculative_tokens=4, adapters=("tuned",))
PLAIN = ServedModel(name="pair", num_speculative_tokens=0)


def translate(message: GenerationMessage, served: ServedModel = SERVED, request_id: str = "r-1") -> GenerationRequest:
    return to_generation_request(message, served, request_id=request_id, clock=lambda: 1000.0)


def refused(message: GenerationMessage, served: ServedModel = SERVED, request_id: str = "r-1") -> RequestError:
    with pytest.raises(RequestError) as caught:
        translate(message, served, request_id)
    assert caught.value.fix, "an error without a fix helps nobody"
    return caught.value


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(**fields))


def structured(**fields: Any) -> pb.GenerateRequest:
    return sampling(structured_outputs=pb.StructuredOutputs(**fields))


def speculation(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", speculation=pb.SpeculationParameters(**fields))


def test_a_bare_prompt_sets_nothing_else() -> None:
    assert translate(pb.GenerateRequest(text="hello")) == GenerationRequest(
        request_id="r-1", prompt_text="hello", deadline=Deadline(4600.0), in_one_piece=True
    )


def test_only_what_the_client_set_is_passed_on_and_zero_counts_as_set() -> None:
    request = translate(sampling(temperature=0.0, seed=0, ignore_eos=False, min_tokens=0))
    assert request.sampling == {"temperature": 0.0, "seed": 0, "ignore_eos": False, "min_tokens": 0}


@pytest.mark.parametrize("message_type", [pb.GenerateRequest, pb.GenerateStreamRequest])
def test_every_field_arrives(message_type: type[GenerationMessage]) -> None:
    chosen: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": -(2**63),
        "max_tokens": 9,
        "min_tokens": 2,
        "repetition_penalty": 1.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "ignore_eos": True,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [0, 99],
        "min_p": 0.1,
        "logit_bias": {7: -100.0, 8: 100.0},
        "n": 64,
        "logprobs": 20,
        "prompt_logprobs": 0,
        "allowed_token_ids": [1, 99],
        "bad_words": ["word", " two words"],
    }
    request = translate(
        message_type(
            token_ids=pb.TokenIds(ids=[0, 99]),
            model="pair",
            sampling=pb.SamplingParameters(**chosen),
            speculation=pb.SpeculationParameters(
                enabled=True, num_speculative_tokens=3, verification=pb.VERIFICATION_BLOCK
            ),
            timeout_ms=1500,
            cache_salt="mine",
            adapter="tuned",
        )
    )
    assert request.cache_salt == "mine"
    assert request.adapter == "tuned"
    assert request.prompt_token_ids == (0, 99)
    assert request.prompt_text is None
    assert request.sampling == chosen
    assert request.num_answers == 64
    assert (request.speculation, request.num_speculative_tokens, request.verification) == (True, 3, "block")
    assert request.deadline == Deadline(1001.5)


def test_speculation_can_be_switched_off_and_the_template_asked_for() -> None:
    request = translate(
        pb.GenerateRequest(
            text="x", apply_chat_template=True, speculation=pb.SpeculationParameters(enabled=False), sampling=None
        )
    )
    assert request.speculation is False
    assert request.apply_chat_template is True


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("prompt", pb.GenerateRequest()),
        ("text", pb.GenerateRequest(text="")),
        ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
        ("apply_chat_template", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), apply_chat_template=True)),
        ("model", pb.GenerateRequest(text="x", model="other")),
        ("model", pb.GenerateRequest(text="x", model="")),
        ("timeout_ms", pb.GenerateRequest(text="x", timeout_ms=0)),
        ("adapter", pb.GenerateRequest(text="x", adapter="other")),
        ("adapter", pb.GenerateRequest(text="x", adapter="")),
        ("model", pb.GenerateRequest(text="x", model="tuned")),
        ("cache_salt", pb.GenerateRequest(text="x", cache_salt="")),
        ("cache_salt", pb.GenerateRequest(text="x", cache_salt="x" * 129)),
        ("sampling.temperature", sampling(temperature=-0.1)),
        ("sampling.temperature", sampling(temperature=2.1)),
        ("sampling.temperature", sampling(temperature=math.nan)),
        ("sampling.temperature", sampling(temperature=math.inf)),
        ("sampling.top_p", sampling(top_p=0.0)),
        ("sampling.top_p", sampling(top_p=1.01)),
        ("sampling.top_p", sampling(top_p=math.nan)),
        ("sampling.top_k", sampling(top_k=-2)),
        ("sampling.min_p", sampling(min_p=-0.1)),
        ("sampling.min_p", sampling(min_p=math.nan)),
        ("sampling.min_p", sampling(min_p=1.1)),
        ("sampling.n", sampling(n=0)),
        ("sampling.n", sampling(n=65)),
        ("sampling.n", sampling(n=2, temperature=0.0)),
        ("sampling.seed", sampling(n=3, seed=-2)),
        ("sampling.logprobs", sampling(logprobs=21)),
        ("sampling.prompt_logprobs", sampling(prompt_logprobs=21)),
        ("sampling.bad_words", sampling(bad_words=["ok", ""])),
        ("sampling.structured_outputs", structured()),
        ("sampling.structured_outputs.json", structured(json="")),
        ("sampling.structured_outputs.json", structured(json="{")),
        ("sampling.structured_outputs.json", structured(json="[1]")),
        ("sampling.structured_outputs.json", structured(json="[" * 60_000)),
        ("sampling.structured_outputs.json_object", structured(json_object=False)),
        ("sampling.structured_outputs.grammar", structured(grammar=" \n")),
        ("sampling.structured_outputs.regex", structured(regex="a\0")),
        ("sampling.structured_outputs.choice", structured(choice=pb.Choices())),
        ("sampling.repetition_penalty", sampling(repetition_penalty=0.0)),
        ("sampling.repetition_penalty", sampling(repetition_penalty=0.009)),
        ("sampling.repetition_penalty", sampling(repetition_penalty=101.0)),
        ("sampling.repetition_penalty", sampling(repetition_penalty=math.inf)),
        ("sampling.repetition_penalty", sampling(repetition_penalty=math.nan)),
        ("sampling.presence_penalty", sampling(presence_penalty=2.1)),
        ("sampling.presence_penalty", sampling(presence_penalty=math.nan)),
        ("sampling.frequency_penalty", sampling(frequency_penalty=-2.1)),
        ("sampling.max_tokens", sampling(max_tokens=0)),
        ("sampling.min_tokens", sampling(min_tokens=6, max_tokens=5)),
        ("sampling.stop", sampling(stop=["ok", ""])),
        ("sampling.logit_bias", sampling(logit_bias={1: 100.5})),
        ("sampling.logit_bias", sampling(logit_bias={1: math.nan})),
        ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=0)),
        ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=5)),
        ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=2, enabled=False)),
        ("speculation.verification", speculation(verification=4)),
    ],
)
def test_each_bad_value_is_refused_by_its_public_name(field: str, message: pb.GenerateRequest) -> None:
    error = refused(message)
    assert error.field == field
    assert str(error).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "message",
    [
        sampling(temperature=2.0, top_p=1.0, top_k=-1, min_p=0.0, max_tokens=1, min_tokens=1),
        sampling(presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=0.01),
        sampling(min_tokens=5),
        sampling(n=1, temperature=0.0, logprobs=0, prompt_logprobs=20, min_p=1.0),
        sampling(n=2),
        sampling(n=2, seed=-1),
        sampling(n=2, seed=-3),
        sampling(n=2, seed=2**63 - 1),
        speculation(num_speculative_tokens=4),
        speculation(num_speculative_tokens=1),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(message: pb.GenerateRequest) -> None:
    translate(message)


@pytest.mark.parametrize("request_id", ["", "a b", "tab\t", "line\n", "ü", "x" * 129])
def test_ids_that_do_not_fit_a_log_line_or_metadata_are_refused(request_id: str) -> None:
    assert refused(pb.GenerateRequest(text="x"), request_id=request_id).field == "request_id"


def test_an_id_of_128_visible_characters_is_kept() -> None:
    assert translate(pb.GenerateRequest(text="x"), request_id="!" * 128).request_id == "!" * 128


def test_the_error_says_what_is_served_and_shortens_what_was_sent() -> None:
    error = refused(pb.GenerateRequest(text="x", model="m" * 100_000))
    assert "'pair'" in str(error)
    assert len(str(error)) < 200


def test_without_a_drafter_there_is_nothing_to_limit() -> None:
    assert "no drafter" in str(refused(speculation(num_speculative_tokens=1), PLAIN))


@pytest.mark.parametrize(
    ("constraint", "passed_on"),
    [
        ({"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": ""}, {"regex": ""}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"choice": pb.Choices(values=["a", ""])}, {"choice": ["a", ""]}),
    ],
)
def test_a_constraint_is_passed_on_under_its_own_name(constraint: dict[str, Any], passed_on: dict[str, Any]) -> None:
    assert translate(structured(**constraint)).sampling == {"structured_outputs": passed_on}


@pytest.mark.parametrize("served", [SERVED, PLAIN])
@pytest.mark.parametrize("enabled", [True, False])
def test_verification_is_chosen_with_and_without_drafts(served: ServedModel, enabled: bool) -> None:
    chosen = [
        translate(speculation(enabled=enabled, verification=value), served).verification
        for value in pb.Verification.values()
    ]
    assert chosen == [None, "rejection", "block", "coupled"]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_constraint_is_not_combined_with_what_it_would_bias(name: str) -> None:
    message = structured(regex="a+")
    message.speculation.verification = pb.Verification.Value(f"VERIFICATION_{name.upper()}")
    error = refused(message)
    assert error.field == "sampling.structured_outputs"
    assert name in str(error)
    assert "coupled" in error.fix


@pytest.mark.parametrize("value", [pb.VERIFICATION_UNSPECIFIED, pb.VERIFICATION_COUPLED])
def test_a_constraint_goes_with_coupled_verification(value: pb.Verification) -> None:
    message = structured(regex="a+")
    message.speculation.verification = value
    assert translate(message).sampling["structured_outputs"] == {"regex": "a+"}


def test_zero_drafts_points_to_the_switch() -> None:
    assert "speculation.enabled" in refused(speculation(num_speculative_tokens=0)).fix


def test_whether_ids_are_in_the_vocabulary_the_target_says() -> None:
    assert translate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1]))).prompt_token_ids == (2**32 - 1,)


def test_an_adapter_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    asked = pb.GenerateRequest(text="x", adapter="other")
    assert str(refused(asked)) == "adapter: 'other' is not known here; send one of 'tuned', or leave it out"
    assert str(refused(asked, PLAIN)) == "adapter: 'other' is not known: there are no adapters; leave it out"


def test_where_adapters_come_and_go_the_target_says_which_there_are() -> None:
    served = ServedModel(name="pair", num_speculative_tokens=4, adapters=None)
    assert translate(pb.GenerateRequest(text="x", adapter="other"), served).adapter == "other"


def test_a_model_that_is_an_adapter_is_asked_for_by_another_field() -> None:
    assert refused(pb.GenerateRequest(text="x", model="tuned")).fix == "send it as adapter"
