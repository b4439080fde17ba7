"""The Python client against a real gRPC server in this process, whose answers are scripted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from deploy.client import OutriderClient, OutriderError, build_request
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

HANG_GUARD_S = 20.0


class ScriptedService(rpc.GenerationServiceServicer):
    """Keeps what it was asked and answers by the prompt's text."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest | pb.GenerateStreamRequest] = []
        self.metadata: dict[str, str] = {}
        self.deadline_s: float | None = None
        self.started, self.cancelled = threading.Event(), threading.Event()

    def _note(self, request: pb.GenerateRequest | pb.GenerateStreamRequest, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        remaining = context.time_remaining()
        self.deadline_s = remaining if remaining is not None and remaining < 1e6 else None
        context.add_callback(self.cancelled.set)
        self.started.set()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._note(request, context)
        if request.text == "hang":
            self.cancelled.wait(HANG_GUARD_S)
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: -1.0 is out of range; send more")
        if request.text == "lose":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the target replica is not available; retry")
        return pb.GenerateResponse(text="whole", token_ids=[1, 2])

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._note(request, context)
        yield pb.GenerateStreamResponse(text_delta="one ", token_ids=[1])
        if request.text == "hang":
            self.cancelled.wait(HANG_GUARD_S)
        if request.text == "break":
            context.abort(grpc.StatusCode.INTERNAL, "request r failed inside the server; its log says why")
        yield pb.GenerateStreamResponse(text_delta="two", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP)

    def GetServerStatus(
        self, request: pb.GetServerStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetServerStatusResponse:
        return pb.GetServerStatusResponse(model="pair")


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def address(service: ScriptedService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def client(address: str) -> Iterator[OutriderClient]:
    with OutriderClient(address) as client:
        yield client


def test_an_answer_arrives_whole_or_round_by_round(client: OutriderClient) -> None:
    assert client.generate("hi").text == "whole"
    assert [message.text_delta for message in client.stream("hi")] == ["one ", "two"]
    assert client.status().model == "pair"


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


def test_a_passed_deadline_is_an_error_with_its_code(client: OutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("hang", timeout_s=0.1)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


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


def test_the_servers_words_are_kept(client: OutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("refuse")
    assert str(caught.value) == "INVALID_ARGUMENT: sampling.temperature: -1.0 is out of range; send more"


def test_an_error_in_mid_stream_comes_after_what_was_sent_before_it(client: OutriderClient) -> None:
    stream = client.stream("break")
    assert next(stream).text_delta == "one "
    with pytest.raises(OutriderError, match="INTERNAL: request r failed"):
        next(stream)


def test_closing_a_stream_cancels_the_request(client: OutriderClient, service: ScriptedService) -> None:
    with client.stream("hang") as stream:
        next(stream)
        assert not service.cancelled.is_set()
    assert service.cancelled.wait(HANG_GUARD_S)
    assert list(stream) == []


def test_closing_the_client_ends_a_waiting_call(client: OutriderClient, service: ScriptedService) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hang")
        assert service.started.wait(HANG_GUARD_S)
        client.close()
        with pytest.raises(OutriderError, match="CANCELLED"):
            waiting.result(HANG_GUARD_S)
    assert service.cancelled.wait(HANG_GUARD_S)


def test_an_unavailable_replica_is_not_taken_for_an_absent_server(client: OutriderClient) -> None:
    with pytest.raises(OutriderError, match="UNAVAILABLE: the target replica"):
        client.generate("lose")


def test_an_absent_server_is_named_with_the_command_that_starts_one() -> None:
    with OutriderClient("127.0.0.1:1") as client, pytest.raises(OutriderError) as caught:
        client.generate("hi")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert "127.0.0.1:1" in caught.value.message
    assert "outrider serve" in caught.value.message


def test_the_application_is_named_only_when_asked(address: str, service: ScriptedService) -> None:
    with OutriderClient(address) as plain:
        plain.generate("hi")
        assert "application" not in service.metadata
    with OutriderClient(address, application="two") as named:
        named.generate("hi")
        assert service.metadata["application"] == "two"
