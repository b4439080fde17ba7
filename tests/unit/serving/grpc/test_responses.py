"""From rounds to public messages: origins, and what a model is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.actors.replica_calls import ModelInfo, RoundOutput, Usage
from outrider.actors.serving.grpc.responses import Answers, model_info_message, stream_message
from outrider.v1 import generation_pb2 as pb

FIRST = RoundOutput("a", (1,), origins=("plain",), num_rounds=1)
LAST = RoundOutput(
    "bcd", (2, 3, 4), "stop", usage=Usage(5, 4), origins=("accepted", "accepted", "recovered"), num_rounds=1
)


def test_a_message_tells_each_tokens_origin() -> None:
    message = stream_message("r", LAST)
    accepted = pb.TOKEN_ORIGIN_ACCEPTED
    assert list(message.origins) == [accepted, accepted, pb.TOKEN_ORIGIN_RECOVERED]
    assert message.num_rounds == 1


def test_a_whole_answer_tells_them_in_the_order_of_its_tokens() -> None:
    answers = Answers("r", 1)
    for output in (FIRST, LAST):
        answers.add(output)
    (completion,) = answers.response().completions
    assert [pb.TokenOrigin.Name(origin) for origin in completion.origins] == [
        "TOKEN_ORIGIN_PLAIN",
        "TOKEN_ORIGIN_ACCEPTED",
        "TOKEN_ORIGIN_ACCEPTED",
        "TOKEN_ORIGIN_RECOVERED",
    ]


def test_a_target_that_tells_none_leaves_them_unspecified() -> None:
    assert list(stream_message("r", RoundOutput("ab", (1, 2))).origins) == [pb.TOKEN_ORIGIN_UNSPECIFIED] * 2


def test_origins_that_do_not_fit_the_tokens_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 origins for 2 tokens"):
        stream_message("r", RoundOutput("ab", (1, 2), origins=("plain",)))


def test_model_info_has_the_apis_own_names() -> None:
    info = ModelInfo(
        256, 100, "float32", "Llama", "Fast", True, (2, 3), ("rejection", "coupled"), "coupled", ("ngram",), 4
    )
    message = model_info_message("pair", info)
    assert list(message.verifications) == [pb.VERIFICATION_REJECTION, pb.VERIFICATION_COUPLED]
    assert message.default_verification == pb.VERIFICATION_COUPLED
    assert (message.model, message.max_model_len, list(message.eos_token_ids)) == ("pair", 256, [2, 3])
    assert (list(message.methods), message.num_speculative_tokens) == (["ngram"], 4)
    assert (message.tool_call_parser, message.reasoning_parser) == ("", "")
    message = model_info_message("pair", replace(info, tool_call_parser="hermes", reasoning_parser="qwen3"))
    assert (message.tool_call_parser, message.reasoning_parser) == ("hermes", "qwen3")
