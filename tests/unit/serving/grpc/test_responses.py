"""Outputs of rounds become public messages with each token's origin."""

from __future__ import annotations

import pytest

from outrider.actors.replica_calls import RoundOutput, Usage
from outrider.actors.serving.grpc.responses import ResponseBuilder, stream_message
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
