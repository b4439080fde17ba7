"""Outputs of rounds become public messages with each token's origin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.actors.replica_calls import ModelInfo, RoundOutput, Usage
from outrider.actors.serving.grpc.responses import ResponseBuilder, model_info_message, stream_message
from outrider.v1 import generation_pb2 as pb

FIRST = RoundOutput("a", (1,), origins=("plain",), num_rounds=1)
LAST = RoundOutput(
    "bcd", (2, 3, 4), "stop", usage=Usage(5, 4), origins=("accepted", "accepted", "recovered"), num_rounds=1
)


ORIGINS = [
    pb.TOKEN_ORIGIN_PLAIN,
    pb.TOKEN_ORIGIN_ACCEPTED,
    pb.TOKEN_ORIGIN_ACCEPTED,
    pb.TOKEN_ORIGIN_RECOVERED,
]


def test_each_token_has_its_origin_in_a_message_and_in_a_whole_answer() -> None:
    message = stream_message("r", LAST)
    assert (list(message.origins), message.num_rounds) == (ORIGINS[1:], 1)
    builder = ResponseBuilder("r", 1)
    for output in (FIRST, LAST):
        builder.add(output)
    (completion,) = builder.response().completions
    assert list(completion.origins) == ORIGINS
    assert list(stream_message("r", RoundOutput("ab", (1, 2))).origins) == [pb.TOKEN_ORIGIN_UNSPECIFIED] * 2
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
