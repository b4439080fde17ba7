"""What no API takes is refused by both with the same words."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.grpc.validation import ServedModel, to_generation_request
from outrider.actors.serving.openai.door import to_openai_request
from outrider.v1 import generation_pb2 as pb

K = 4


def over_grpc(request_id: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        to_generation_request(pb.GenerateRequest(text="go", **fields), ServedModel("tiny", K), request_id=request_id)
    return caught.value


def over_http(request_id: str, **fields: Any) -> RequestError:
    body = {"prompt": "go", **fields}
    with pytest.raises(RequestError) as caught:
        to_openai_request(
            "completions", body, {"x-request-id": request_id}, num_speculative_tokens=K, request_id="made"
        )
    return caught.value


GRAMMAR = pb.StructuredOutputs(regex="a")

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rejection under a grammar": (
        "r",
        {
            "sampling": pb.SamplingParameters(structured_outputs=GRAMMAR),
            "speculation": pb.SpeculationParameters(verification=pb.VERIFICATION_REJECTION),
        },
        {"structured_outputs": {"regex": "a"}, "speculation": {"verification": "rejection"}},
    ),
    "block under a grammar, greedy": (
        "r",
        {
            "sampling": pb.SamplingParameters(structured_outputs=GRAMMAR, temperature=0),
            "speculation": pb.SpeculationParameters(verification=pb.VERIFICATION_BLOCK),
        },
        {"structured_outputs": {"regex": "a"}, "temperature": 0, "speculation": {"verification": "block"}},
    ),
    "too many answers": ("r", {"sampling": pb.SamplingParameters(n=65)}, {"n": 65}),
    "too hot": ("r", {"sampling": pb.SamplingParameters(temperature=2.5)}, {"temperature": 2.5}),
    "seeds over no seed": ("r", {"sampling": pb.SamplingParameters(n=5, seed=-3)}, {"n": 5, "seed": -3}),
    "no drafts by number": (
        "r",
        {"speculation": pb.SpeculationParameters(num_speculative_tokens=0)},
        {"speculation": {"num_speculative_tokens": 0}},
    ),
    "too many drafts": (
        "r",
        {"speculation": pb.SpeculationParameters(num_speculative_tokens=K + 1)},
        {"speculation": {"num_speculative_tokens": K + 1}},
    ),
    "drafts and none": (
        "r",
        {"speculation": pb.SpeculationParameters(num_speculative_tokens=2, enabled=False)},
        {"speculation": {"num_speculative_tokens": 2, "enabled": False}},
    ),
    "no id": ("a b", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_words(case: str) -> None:
    request_id, fields, body = CASES[case]
    grpc, http = over_grpc(request_id, **fields), over_http(request_id, **body)
    assert (grpc.problem, grpc.fix) == (http.problem, http.fix)


def test_a_grammar_takes_coupled_verification() -> None:
    speculation = pb.SpeculationParameters(verification=pb.VERIFICATION_COUPLED)
    message = pb.GenerateRequest(
        text="go", sampling=pb.SamplingParameters(structured_outputs=GRAMMAR), speculation=speculation
    )
    assert to_generation_request(message, ServedModel("tiny", K), request_id="r").verification == "coupled"
    body = {"prompt": "go", "structured_outputs": {"regex": "a"}, "speculation": {"verification": "coupled"}}
    asked = to_openai_request("completions", body, {}, num_speculative_tokens=K, request_id="r")
    assert asked.round_options == {"verification": "coupled"}
