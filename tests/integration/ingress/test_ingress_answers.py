"""The ingress answers in streams round by round, in whole answers, and with several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.actors.serving.failures import REQUEST_ID_METADATA
from outrider.deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.integration.ingress.calls import failure
from tests.integration.ingress.stand_in_target import HANG_GUARD_S

pytestmark = pytest.mark.timeout(600)


def test_a_stream_sends_one_message_a_round_in_order(client: OutriderClient) -> None:
    messages = list(client.stream("go", request_id="r-stream"))
    assert [message.text_delta for message in messages] == ["one ", "", "three"]
    assert [list(message.token_ids) for message in messages] == [[1], [2, 3], [4]]
    assert {message.request_id for message in messages} == {"r-stream"}
    *running, last = messages
    for message in running:
        assert message.finish_reason == pb.FINISH_REASON_UNSPECIFIED
        assert not (message.HasField("usage"))
        assert not (message.HasField("metrics"))
        assert not (message.HasField("stop_reason"))
    assert (last.finish_reason, last.stop_reason) == (pb.FINISH_REASON_STOP, "END")


def test_a_round_arrives_before_the_next_one_is_made(client: OutriderClient, meeting_point: Path) -> None:
    stream = client.stream("wait", request_id="r-wait", timeout_s=HANG_GUARD_S)
    assert next(stream).text_delta == "one "
    (meeting_point / "r-wait.go").touch()
    assert "".join(message.text_delta for message in stream) == "three"


def test_the_unary_answer_is_the_stream_joined(client: OutriderClient) -> None:
    response = client.generate("go")
    assert response.text == "one three"
    assert list(response.token_ids) == [1, 2, 3, 4]
    assert (response.finish_reason, response.stop_reason) == (pb.FINISH_REASON_STOP, "END")
    assert response.usage == pb.Usage(prompt_tokens=5, completion_tokens=4, total_tokens=9, cached_tokens=2)
    assert response.metrics.speculative_decoding == pb.SpeculativeDecodingMetrics(
        num_spec_steps=2,
        num_draft_tokens=8,
        num_accepted_draft_tokens=1,
        mean_acceptance_length=1.5,
        draft_acceptance_rate=0.125,
        acceptance_histogram=[1, 1, 0, 0, 0],
    )
    assert response.metrics.timing == pb.RequestTiming(
        queue_time_s=0.5, prefill_time_s=0.25, decode_time_s=2.0, e2e_latency_s=3.0
    )
    assert response.request_id
    assert response.request_id != client.generate("go").request_id


OWN_LOGPROBS = pb.TokenLogprobs(
    token_id=1,
    logprob=-0.5,
    rank=2,
    top=[pb.TokenLogprob(token_id=9, logprob=-0.25), pb.TokenLogprob(token_id=1, logprob=-0.5)],
)


def test_a_stream_goes_on_until_every_answer_has_ended(client: OutriderClient) -> None:
    messages = list(client.stream("two", n=2, logprobs=2, prompt_logprobs=2))
    assert [(message.index, message.text_delta) for message in messages] == [(1, "a"), (0, "b"), (0, "c"), (1, "d")]
    ends = [message for message in messages if message.finish_reason]
    assert [(end.index, end.finish_reason, end.usage.completion_tokens) for end in ends] == [
        (0, pb.FINISH_REASON_STOP, 2),
        (1, pb.FINISH_REASON_LENGTH, 1),
    ]
    assert [end.usage.total_tokens for end in ends] == [7, 6]
    assert [end.HasField("stop_reason") for end in ends] == [True, False]
    assert list(messages[0].logprobs) == [OWN_LOGPROBS]
    assert list(messages[0].prompt_logprobs) == [pb.TokenLogprobs(), OWN_LOGPROBS]
    assert [len(message.prompt_logprobs) for message in messages[1:]] == [0, 0, 0]


def test_the_unary_answer_holds_every_answer_by_index(client: OutriderClient) -> None:
    response = client.generate("two", n=2, logprobs=2, prompt_logprobs=2)
    first, second = response.completions
    assert (first.text, list(first.token_ids), first.finish_reason) == ("bc", [2, 3, 4], pb.FINISH_REASON_STOP)
    assert (first.stop_reason, list(first.logprobs)) == ("END", [OWN_LOGPROBS] * 2)
    assert first.metrics.speculative_decoding.num_draft_tokens == 4
    assert (second.text, list(second.token_ids), second.finish_reason) == ("ad", [1], pb.FINISH_REASON_LENGTH)
    assert not second.HasField("stop_reason")
    assert list(second.logprobs) == [OWN_LOGPROBS]
    assert (response.text, response.token_ids, response.finish_reason) == (
        first.text, first.token_ids, first.finish_reason,
    )  # fmt: skip
    assert (response.stop_reason, response.metrics) == (first.stop_reason, first.metrics)
    assert response.usage == pb.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=1)
    assert list(response.prompt_logprobs) == [pb.TokenLogprobs(), OWN_LOGPROBS]


@pytest.mark.parametrize("options", [{"n": 3}, {}])
def test_answers_that_are_missing_or_not_asked_for_are_a_failure(client: OutriderClient, options: Any) -> None:
    assert failure(lambda: client.generate("two", **options)).code is grpc.StatusCode.INTERNAL


def test_an_end_without_a_name_of_ours_is_an_abort_with_its_reason(client: OutriderClient) -> None:
    response = client.generate("new reason")
    assert (response.finish_reason, response.stop_reason) == (pb.FINISH_REASON_ABORT, "repetition")


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
def test_the_request_id_is_in_the_trailing_metadata(address: str, name: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if name == "Generate":
            _, call = stub.Generate.with_call(pb.GenerateRequest(text="go", request_id="r-trailer"))
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(text="go", request_id="r-trailer"))
            list(call)
        assert dict(call.trailing_metadata())[REQUEST_ID_METADATA] == "r-trailer"
