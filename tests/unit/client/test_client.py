"""The synchronous Python client against a real gRPC server in this process, whose answers are scripted."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2

import outrider
from deploy.client import FieldViolation, OutriderClient, OutriderError, build_request
from deploy.ports import pick_free_port
from outrider.v1 import generation_pb2 as pb
from tests.unit.scripted_service import FULL, HANG_GUARD_S, LOST, ScriptedService, serving


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def address(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


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


def test_an_interrupted_wait_cancels_the_request(client: OutriderClient, service: ScriptedService) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def press() -> None:
        assert service.started.wait(HANG_GUARD_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            client.generate("hang")
    finally:
        pressing.join()
        signal.signal(signal.SIGUSR1, before)
    assert caught.tb is not None, "it keeps the call from being collected, which would cancel it too"
    assert service.cancelled.wait(HANG_GUARD_S)
    assert client._balancer.loads(0.0) == [0.0]


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


def test_every_rpc_of_the_api_has_a_method(client: OutriderClient) -> None:
    methods = {
        "Generate": "generate",
        "GenerateStream": "stream",
        "AbortRequest": "abort",
        "Tokenize": "tokenize",
        "Detokenize": "detokenize",
        "GetModelInfo": "model_info",
        "GetServerInfo": "server_info",
        "GetServerStatus": "status",
    }
    assert set(pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name) == set(methods)
    assert all(callable(getattr(client, name)) for name in methods.values())


def test_every_sampling_parameter_is_an_option() -> None:
    from deploy.client_request import GenerationOptions

    fields = {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields} - {"structured_outputs"}
    assert fields <= set(GenerationOptions.__annotations__)


@pytest.mark.parametrize(
    ("health", "healthy"),
    [
        (health_pb2.HealthCheckResponse.SERVING, True),
        (health_pb2.HealthCheckResponse.NOT_SERVING, False),
        (grpc.StatusCode.UNAVAILABLE, False),
        (grpc.StatusCode.NOT_FOUND, False),
    ],
)
def test_health_is_yes_or_no(
    client: OutriderClient, service: ScriptedService, health: int | grpc.StatusCode, healthy: bool
) -> None:
    service.health = health
    assert client.healthy() is healthy


def test_health_of_nobody_and_of_a_server_without_it(client: OutriderClient, service: ScriptedService) -> None:
    with OutriderClient("127.0.0.1:1") as nobody:
        assert nobody.healthy(timeout_s=1.0) is False
    service.health = grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(OutriderError, match="UNIMPLEMENTED"):
        client.healthy()


def test_a_refusal_says_which_field_and_which_request(client: OutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("refuse")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.field_violations == (FieldViolation("sampling.temperature", "-1.0 is out of range; send more"),)
        assert (error.request_id, error.reason, error.retry_after_s) == ("r-1", "INVALID_REQUEST", None)


def test_the_id_that_was_sent_is_the_error_s_when_the_server_names_none(client: OutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        list(client.stream("break", request_id="mine"))
    assert caught.value.request_id == "mine"


def test_nothing_is_sent_twice_unless_asked_for(client: OutriderClient, service: ScriptedService) -> None:
    service.failing = [LOST]
    with pytest.raises(OutriderError) as caught:
        client.generate("hi")
    assert caught.value.retry_after_s == 1.0
    assert len(service.requests) == 1


@pytest.mark.parametrize("failure", [LOST, FULL], ids=lambda failure: failure.code.name)
def test_retries_wait_as_long_as_the_server_says(
    address: str, service: ScriptedService, failure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with OutriderClient(address, retries=1) as client:
        monkeypatch.setattr(client._closed, "wait", lambda delay_s: waits.append(delay_s))
        service.failing = [failure]
        assert client.generate("hi", timeout_s=30.0).text == "whole"
        service.failing = [failure]
        stream = client.stream("hi")
        monkeypatch.setattr(stream._closed, "wait", lambda delay_s: waits.append(delay_s))
        assert len(list(stream)) == 2
        service.failing = [failure, failure]
        with pytest.raises(OutriderError) as caught:
            client.generate("hi")
    assert waits == [1.0, 1.0, 1.0]
    assert caught.value.code is failure.code
    assert service.requests[0].timeout_ms > service.requests[1].timeout_ms


def test_a_stream_that_has_begun_is_not_sent_again(address: str, service: ScriptedService) -> None:
    with OutriderClient(address, retries=3) as client:
        stream = client.stream("lose")
        assert next(stream).text_delta == "one "
        for _ in range(2):
            with pytest.raises(OutriderError, match="UNAVAILABLE"):
                next(stream)
    assert len(service.requests) == 1


def test_closing_a_stream_or_the_client_ends_the_wait_for_a_retry(address: str, service: ScriptedService) -> None:
    service.failing = [LOST] * 10
    with OutriderClient(address, retries=10) as client, ThreadPoolExecutor(2) as pool:
        stream = client.stream("hi")
        reading = pool.submit(list, stream)
        assert service.started.wait(HANG_GUARD_S)
        stream.close()
        assert reading.result(HANG_GUARD_S) == []
        waiting = pool.submit(client.generate, "hi")
        client.close()
        with pytest.raises(OutriderError):
            waiting.result(HANG_GUARD_S)


def test_a_stream_that_is_dropped_is_cancelled(client: OutriderClient, service: ScriptedService) -> None:
    for message in client.stream("hang"):
        assert message.text_delta == "one "
        break
    gc.collect()
    assert service.cancelled.wait(HANG_GUARD_S)
    assert client._balancer.loads(0.0) == [0.0]


def test_several_servers_share_the_calls_by_load(address: str, service: ScriptedService) -> None:
    other = ScriptedService()
    with serving(other) as second, OutriderClient([address, second]) as client:
        for _ in range(4):
            client.generate("hi")
        assert (len(service.requests), len(other.requests)) == (2, 2)
        service.held = 5
        list(client.stream("hi"))
        list(client.stream("hi"))
        assert (len(service.requests), len(other.requests)) == (3, 3)
        for _ in range(3):
            list(client.stream("hi"))
        assert (len(service.requests), len(other.requests)) == (3, 6), "the first one has five others'"
        with client.stream("hang"):
            service.held = None
            assert client._balancer.loads(float("inf")) == [0.0, 1.0]


def test_a_server_that_is_gone_is_passed_over(service: ScriptedService, address: str) -> None:
    gone = f"127.0.0.1:{pick_free_port()}"
    with OutriderClient([gone, address], retries=1) as client:
        assert [client.generate("hi").text for _ in range(3)] == ["whole"] * 3
        assert client.healthy()
    assert len(service.requests) == 3


def test_a_request_is_ended_wherever_it_runs(service: ScriptedService, address: str) -> None:
    other = ScriptedService()
    other.running = {"r-there"}
    with serving(other) as second, OutriderClient([address, second]) as client:
        assert client.abort("r-there") is True
        assert client.abort("r-nowhere") is False
    with OutriderClient([address, f"127.0.0.1:{pick_free_port()}"]) as client:
        assert client.abort("r-running") is True
        with pytest.raises(OutriderError, match="no server answers"):
            client.abort("r-nowhere")


def test_no_address_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="address: is empty"):
        OutriderClient([])


def test_a_closed_client_says_so() -> None:
    client = OutriderClient("127.0.0.1:1")
    client.close()
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        client.generate("hi")
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        client.stream("hi")


def test_metadata_goes_with_every_call(address: str, service: ScriptedService) -> None:
    with OutriderClient(address, application="two", metadata=[("authorization", "Bearer x")]) as client:
        client.tokenize("hi")
    assert (service.metadata["application"], service.metadata["authorization"]) == ("two", "Bearer x")


def test_credentials_make_the_connection_a_secure_one(service: ScriptedService) -> None:
    """gRPC's credentials for connections within one machine stand for TLS: a client without any is not let in."""
    secure = grpc.local_server_credentials(grpc.LocalConnectionType.LOCAL_TCP)
    with (
        serving(service, credentials=secure) as address,
        OutriderClient(address, credentials=grpc.local_channel_credentials()) as client,
    ):
        assert client.generate("hi").text == "whole"


def test_the_clients_are_where_people_look_for_them() -> None:
    assert outrider.OutriderClient is OutriderClient
    assert outrider.OutriderError is OutriderError
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name
    with pytest.raises(AttributeError, match="NoSuchClient"):
        outrider.NoSuchClient  # noqa: B018
