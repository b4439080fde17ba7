"""The front door as clients meet it: Ray, Serve's gRPC proxy and the real Ingress, before a scripted target.

The stand-in target does what its prompt says and meets the test in files of one directory, so that no extra Ray call
takes one of its slots.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

from actors.generation import (
    GenerationRequest,
    RequestError,
    RequestTiming,
    RoundOutput,
    SamplingFailed,
    SpeculativeDecodingMetrics,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from actors.ingress import servicer
from actors.ingress.call_failure import REQUEST_ID_METADATA, STATUS_DETAILS_METADATA
from actors.ingress.servicer import Ingress
from actors.model_info import ModelInfo
from actors.routing.broadcast import ReplicaReply
from actors.tokenization import TokenizeRequest, Tokens
from cluster.link.frame import PROTOCOL_VERSION
from deploy.client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc

HANG_GUARD_S = 20.0
K, VOCAB_SIZE = 4, 100
TARGET_SLOTS, TARGET_QUEUE = 4, 2

STATUS = {
    "methods": ["ngram"],
    "speculation_up": True,
    "num_speculative_tokens": K,
    "link": {"state": "LINK_STATE_UP", "epoch": 2, "reconnects": 1, "drafter": "Drafter-0", "rtt_us": 106.5},
    "rounds": {"rounds": 10, "drafted": 30, "accepted": 15, "median": {"period_ms": 12.5, "samples": 10}},
    "target": {"running": 1, "waiting": 0, "kv_cache_usage": 0.25},
}

pytestmark = pytest.mark.timeout(600)


def stand_in_target(meeting_point: str) -> serve.Application:
    """Defined in here so that it travels by value: the replica cannot import this module."""

    @serve.deployment(name="Target", max_ongoing_requests=TARGET_SLOTS, max_queued_requests=TARGET_QUEUE)
    class StandInTarget:
        def __init__(self) -> None:
            self._at = Path(meeting_point)

        async def generate(self, request: GenerationRequest) -> AsyncIterator[RoundOutput]:
            script = request.prompt_text
            if script == "refuse":
                raise RequestError("text", "300 tokens are over max_model_len (256)", "shorten the prompt")
            if script == "explode":
                raise ValueError("a secret of the inside")
            if script == "miss the deadline":
                raise TimeoutError
            if script == "die":
                os._exit(1)
            if script == "two":
                own = TokenLogprobs(1, -0.5, 2, (TokenLogprob(9, -0.25), TokenLogprob(1, -0.5)))
                yield RoundOutput("a", (1,), index=1, logprobs=(own,), prompt_logprobs=(None, own))
                yield RoundOutput("b", (2,), index=0)
                last = RoundOutput(
                    "c", (3, 4), "stop", "END", Usage(5, 2, 1), SpeculativeDecodingMetrics(1, 4, 1), 0, (own, own)
                )
                yield last
                if script_ends := request.sampling.get("max_tokens"):
                    yield {1: last, 2: replace(last, index=2)}.get(script_ends, last)
                yield RoundOutput("d", (), "length", usage=Usage(5, 1, 1), index=1)
                return
            if script == "no token":
                yield RoundOutput("one ", (1,))
                raise SamplingFailed(request.request_id)
            if script == "new reason":
                yield RoundOutput("one", (1,), "repetition", usage=Usage(5, 1))
                return
            yield RoundOutput("one ", (1,))
            if script == "hang":
                try:
                    (self._at / f"{request.request_id}.started").touch()
                    await asyncio.sleep(HANG_GUARD_S * 3)
                except asyncio.CancelledError:
                    (self._at / f"{request.request_id}.cancelled").touch()
                    raise
            if script == "explode later":
                raise ValueError("a secret of the inside")
            if script == "end early":
                return
            if script == "wait":
                while not (self._at / f"{request.request_id}.go").exists():  # noqa: ASYNC110 - made by another process
                    await asyncio.sleep(0.01)
            yield RoundOutput("", (2, 3))
            yield RoundOutput(
                "three",
                (4,),
                finish_reason="stop",
                stop_reason="END",
                usage=Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2),
                speculative_decoding=SpeculativeDecodingMetrics(2, 8, 1, 1.5, 0.125, (1, 1, 0, 0, 0)),
                timing=RequestTiming(0.5, 0.25, 2.0, 3.0),
            )

        async def status(self) -> dict[str, Any]:
            return json.loads((self._at / "status.json").read_text())

        async def tokenize(self, request: TokenizeRequest) -> Tokens:
            if request.chat is not None:
                raise RequestError("chat", "the model has no chat template", "send text")
            return Tokens(tuple((request.text or "").encode()), 256, ("a",) if request.return_token_strs else ())

        async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
            return bytes(token_ids).decode() + "!" * (not skip_special_tokens)

        async def model_info(self) -> ModelInfo:
            return ModelInfo(
                256, VOCAB_SIZE, "float32", "Llama", "Fast", False, (2,), ("coupled",), "coupled", ("ngram",), K
            )

        async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
            if method == "check_health":
                broken = (self._at / "broken").exists()
                return ReplicaReply("one", error="RuntimeError: the engine is dead" if broken else None)
            (self._at / f"{args[0]}.asked").touch()
            return ReplicaReply("one", value=False)

    return StandInTarget.bind()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def meeting_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting")


@pytest.fixture(scope="module")
def address(meeting_point: Path) -> Iterator[str]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = free_port()
    try:
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=["actors.ingress.grpc_services.add_services"]),
        )
        front = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=100)
        serve.run(front.bind(stand_in_target(str(meeting_point)), "pair", K, VOCAB_SIZE), name="outrider")
        yield f"127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def client(address: str) -> Iterator[OutriderClient]:
    with OutriderClient(address) as client:
        yield client


SERVING = health_pb2.HealthCheckResponse.SERVING


def reason(error: grpc.RpcError) -> str:
    """The stable name of what went wrong, from the error's google.rpc details."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[STATUS_DETAILS_METADATA])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


def failure(call: Callable[[], Any]) -> OutriderError:
    with pytest.raises(OutriderError) as caught:
        call()
    return caught.value


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


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "max_tokens": 1}, {"n": 2, "max_tokens": 2}, {}])
def test_answers_that_are_missing_repeated_or_not_asked_for_are_a_failure(client: OutriderClient, options: Any) -> None:
    assert failure(lambda: client.generate("two", **options)).code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_request_no_token_can_be_chosen_for_says_so(client: OutriderClient, way: str) -> None:
    if way == "unary":
        error = failure(lambda: client.generate("no token", request_id="r-nan"))
    else:
        error = failure(lambda: list(client.stream("no token", request_id="r-nan")))
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == "request r-nan: the model's logits for the next token were not finite"


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


def test_the_status_of_the_target_is_passed_on(client: OutriderClient, meeting_point: Path) -> None:
    (meeting_point / "status.json").write_text(json.dumps(STATUS))
    status = client.status()
    assert (status.model, list(status.methods), status.speculation_up) == ("pair", ["ngram"], True)
    assert (status.link.state, status.link.epoch, status.link.rtt_us) == (pb.LINK_STATE_UP, 2, 106.5)
    assert (status.rounds.accepted, status.rounds.median.period_ms) == (15, 12.5)
    assert status.target.kv_cache_usage == 0.25
    assert not status.HasField("drafter")


def test_a_status_with_a_wrong_name_is_an_error_not_a_gap(client: OutriderClient, meeting_point: Path) -> None:
    (meeting_point / "status.json").write_text(json.dumps({"link": {"epok": 1}}))
    assert failure(client.status).code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("text", "", {}),
        ("token_ids", [], {}),
        ("token_ids", [VOCAB_SIZE], {}),
        ("sampling.temperature", "go", {"temperature": -1.0}),
        ("sampling.temperature", "go", {"temperature": math.nan}),
        ("sampling.top_p", "go", {"top_p": 0.0}),
        ("sampling.max_tokens", "go", {"max_tokens": 0}),
        ("sampling.min_p", "go", {"min_p": 1.5}),
        ("sampling.n", "go", {"n": 2, "temperature": 0.0}),
        ("sampling.logprobs", "go", {"logprobs": 21}),
        ("sampling.allowed_token_ids", "go", {"allowed_token_ids": [VOCAB_SIZE]}),
        ("sampling.structured_outputs.json", "go", {"json_schema": "{"}),
        ("sampling.structured_outputs", "go", {"regex": "a", "verification": "rejection"}),
        ("speculation.num_speculative_tokens", "go", {"num_speculative_tokens": K + 1}),
        ("model", "go", {"model": "another"}),
        ("request_id", "go", {"request_id": "a b"}),
        ("text", "refuse", {}),
    ],
)
@pytest.mark.parametrize("way", ["unary", "stream"])
def test_bad_input_is_named_and_explained(
    client: OutriderClient, way: str, field: str, prompt: str | list[int], options: Any
) -> None:
    call = (
        (lambda: client.generate(prompt, **options))
        if way == "unary"
        else (lambda: list(client.stream(prompt, **options)))
    )
    error = failure(call)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message.startswith(f"{field}: ")
    assert "; " in error.message
    assert "\n" not in error.message


def test_a_missing_prompt_is_named(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("prompt: ")


@pytest.mark.parametrize("script", ["explode", "explode later", "end early"])
@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_failure_inside_says_which_request_and_nothing_of_the_inside(
    client: OutriderClient, way: str, script: str
) -> None:
    if way == "unary":
        error = failure(lambda: client.generate(script, request_id="r-boom"))
    else:
        error = failure(lambda: list(client.stream(script, request_id="r-boom")))
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == "request r-boom failed inside the server; its log says why"


def test_a_deadline_noticed_by_the_target_is_a_passed_deadline(client: OutriderClient) -> None:
    assert failure(lambda: client.generate("miss the deadline")).code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_passed_deadline_ends_the_call_and_the_targets_work(address: str, meeting_point: Path, way: str) -> None:
    """Set in the request alone: the server has to notice it without the client's help."""
    request_id = f"r-late-{way}"
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if way == "unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id, timeout_ms=1000))
        else:
            call = iter(
                stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id, timeout_ms=1000))
            )
            assert next(call).text_delta == "one "
        with pytest.raises(grpc.RpcError) as caught:
            call.result()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert request_id in caught.value.details()
    wait_for((meeting_point / f"{request_id}.cancelled").exists)


@pytest.mark.parametrize("way", ["cancelled stream", "cancelled unary", "dropped connection"])
def test_a_client_that_leaves_stops_the_targets_work(address: str, meeting_point: Path, way: str) -> None:
    request_id = f"r-{way.replace(' ', '-')}"
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        if way == "cancelled unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id))
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id))
        wait_for((meeting_point / f"{request_id}.started").exists)
        assert not (meeting_point / f"{request_id}.cancelled").exists()
        if way == "dropped connection":
            channel.close()
        else:
            call.cancel()
        wait_for((meeting_point / f"{request_id}.cancelled").exists)


def test_no_cancellation_is_lost_while_a_message_is_being_written(client: OutriderClient, meeting_point: Path) -> None:
    """Cancelled as soon as the target has made its first message. Left to itself, Serve loses about one in ten."""
    for attempt in range(60):
        request_id = f"r-early-{attempt}"
        with client.stream("hang", request_id=request_id):
            wait_for((meeting_point / f"{request_id}.started").exists)
        wait_for((meeting_point / f"{request_id}.cancelled").exists)


def test_a_full_queue_refuses_at_once_and_admitted_requests_go_on(client: OutriderClient, meeting_point: Path) -> None:
    hanging = [client.stream("hang", request_id=f"r-slot-{slot}") for slot in range(TARGET_SLOTS)]
    for slot in range(TARGET_SLOTS):
        wait_for((meeting_point / f"r-slot-{slot}.started").exists)
    too_many = 3
    with ThreadPoolExecutor(TARGET_QUEUE + too_many) as pool:
        calls = [pool.submit(client.generate, "go", timeout_s=HANG_GUARD_S) for _ in range(TARGET_QUEUE + too_many)]
        wait_for(lambda: sum(call.done() for call in calls) == too_many)
        for slot in hanging:
            slot.close()
        errors = [call.exception() for call in calls if call.exception() is not None]
    assert [error.code for error in errors] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * too_many


def test_reflection_describes_the_service(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "outrider.v1.GenerationService" in database.get_services()
        described = database.FindFileContainingSymbol("outrider.v1.GenerationService")
        assert [method.name for method in described.service[0].method] == [
            "Generate",
            "GenerateStream",
            "AbortRequest",
            "Tokenize",
            "Detokenize",
            "GetModelInfo",
            "GetServerInfo",
            "GetServerStatus",
        ]


def test_reflection_is_enough_to_call_without_stubs(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        for service, rpc_name, fields, expected in (
            ("outrider.v1.GenerationService", "Tokenize", {"text": "hi"}, "token_ids: 104"),
            ("outrider.v1.GenerationService", "GetModelInfo", {}, 'architecture: "Llama"'),
            ("grpc.health.v1.Health", "Check", {}, "status: SERVING"),
        ):
            method = pool.FindServiceByName(service).FindMethodByName(rpc_name)
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            call = channel.unary_unary(
                f"/{service}/{rpc_name}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            assert expected in str(call(request(**fields)))


def test_health_is_that_of_the_target(address: str, meeting_point: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "outrider.v1.GenerationService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="outrider.v2.Other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert reason(caught.value) == "UNKNOWN_SERVICE"
        statuses = health.List(health_pb2.HealthListRequest()).statuses
        assert {name: each.status for name, each in statuses.items()} == {
            "": SERVING,
            "outrider.v1.GenerationService": SERVING,
        }
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_GUARD_S)
        assert next(watched).status == SERVING
        (meeting_point / "broken").touch()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        (meeting_point / "broken").unlink()
        assert next(watched).status == SERVING
        watched.cancel()
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=HANG_GUARD_S)
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


def test_tokens_and_text_are_asked_of_the_target(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        found = stub.Tokenize(pb.TokenizeRequest(text="hi", return_token_strs=True))
        assert (list(found.token_ids), found.count, found.max_model_len) == ([104, 105], 2, 256)
        assert list(found.token_strs) == ["a"]
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[72, 73])).text == "HI!"
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[72, 73], skip_special_tokens=True)).text == "HI"
        for ask, request, field in (
            (stub.Tokenize, pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user")])), "chat"),
            (stub.Tokenize, pb.TokenizeRequest(), "prompt"),
            (stub.Tokenize, pb.TokenizeRequest(model="another", text="a"), "model"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]), "token_ids"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(f"{field}: ")


def test_what_is_served_and_by_what(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        model = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model, model.max_model_len, model.num_speculative_tokens) == ("pair", 256, K)
        server = stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.ray_version == ray.__version__
        assert server.outrider_version
        assert server.vllm_version.startswith("0.")
        assert server.torch_version
        assert 0 <= time.time() - server.start_time.ToSeconds() < 3600
        assert (server.api, server.link_protocol_version) == ("outrider.v1", PROTOCOL_VERSION)


def test_a_refusal_has_details_for_programs(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        bad = {"text": "refuse", "request_id": "r-details"}
        with pytest.raises(grpc.RpcError) as unary:
            stub.Generate(pb.GenerateRequest(**bad))
        with pytest.raises(grpc.RpcError) as streamed:
            list(stub.GenerateStream(pb.GenerateStreamRequest(**bad)))
    for error in (unary.value, streamed.value):
        assert error.details() == "text: 300 tokens are over max_model_len (256); shorten the prompt"
        assert reason(error) == "INVALID_REQUEST"
        assert dict(error.trailing_metadata())[REQUEST_ID_METADATA] == "r-details"


def test_an_id_that_is_in_use_is_refused_and_free_again_later(client: OutriderClient, meeting_point: Path) -> None:
    with client.stream("hang", request_id="r-twice") as stream:
        assert next(stream).text_delta == "one "
        error = failure(lambda: client.generate("go", request_id="r-twice"))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
        assert error.message.startswith("request_id: 'r-twice'")
    wait_for((meeting_point / "r-twice.cancelled").exists)
    wait_for(lambda: _is_free(client, "r-twice"))


def _is_free(client: OutriderClient, request_id: str) -> bool:
    try:
        return client.generate("go", request_id=request_id).text == "one three"
    except OutriderError as error:
        if error.code is not grpc.StatusCode.ALREADY_EXISTS:
            raise
        return False


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_an_aborted_request_ends_and_its_targets_work_too(address: str, meeting_point: Path, way: str) -> None:
    """From another connection. The target does not know the request, so it is the ingress that ends it."""
    request_id = f"r-abort-{way}"
    with grpc.insecure_channel(address) as channel, grpc.insecure_channel(address) as other:
        stub = rpc.GenerationServiceStub(channel)
        if way == "unary":
            call = stub.Generate.future(pb.GenerateRequest(text="hang", request_id=request_id))
            wait_for((meeting_point / f"{request_id}.started").exists)
        else:
            call = stub.GenerateStream(pb.GenerateStreamRequest(text="hang", request_id=request_id))
            assert next(call).text_delta == "one "
        abort = rpc.GenerationServiceStub(other).AbortRequest
        assert abort(pb.AbortRequestRequest(request_id=request_id)).aborted
        answer = call.result() if way == "unary" else list(call)[-1]
        assert answer.finish_reason == pb.FINISH_REASON_ABORT
        assert answer.usage.completion_tokens == 1
        wait_for((meeting_point / f"{request_id}.cancelled").exists)
        assert (meeting_point / f"{request_id}.asked").exists()
        assert not abort(pb.AbortRequestRequest(request_id=request_id)).aborted
        with pytest.raises(grpc.RpcError) as caught:
            abort(pb.AbortRequestRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_does_not_decode_is_the_clients_fault(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for name in ("Generate", "Tokenize"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/outrider.v1.GenerationService/{name}")(b"\x1a\x02\xc3\x28")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason(caught.value) == "UNDECODABLE_REQUEST"


def test_a_single_application_needs_no_name_and_minds_no_wrong_one(address: str) -> None:
    with OutriderClient(address, application="another") as client:
        assert client.generate("go").text == "one three"


def test_a_lost_replica_is_unavailable_and_its_successor_answers(client: OutriderClient) -> None:
    assert failure(lambda: list(client.stream("die"))).code is grpc.StatusCode.UNAVAILABLE

    def answers() -> bool:
        try:
            return client.generate("go", timeout_s=HANG_GUARD_S).text == "one three"
        except OutriderError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    wait_for(answers)


def test_a_target_that_does_not_answer_makes_no_status_call_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        generate = status = None
        cancelled = False

        def __init__(self) -> None:
            self.generate = self.status = self

        def options(self, **_: Any) -> Silent:
            return self

        def remote(self, *_: Any) -> Silent:
            return self

        def __await__(self) -> Any:
            return asyncio.sleep(HANG_GUARD_S).__await__()

        def cancel(self) -> None:
            self.cancelled = True

    class Context:
        _code: grpc.StatusCode | None = None

        def set_code(self, code: grpc.StatusCode) -> None:
            self._code = code

        def code(self) -> grpc.StatusCode | None:
            return self._code

        def set_details(self, details: str) -> None: ...

        def set_trailing_metadata(self, metadata: Any) -> None: ...

    monkeypatch.setattr(servicer, "CONTROL_TIMEOUT_S", 0.05)
    silent, context = Silent(), Context()
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        asyncio.run(Ingress(silent, "pair", K).GetServerStatus(pb.GetServerStatusRequest(), context))  # type: ignore[arg-type]
    assert context.code() is grpc.StatusCode.UNAVAILABLE
    assert silent.cancelled
