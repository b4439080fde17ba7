"""The synchronous Python client against a real gRPC server in this process, whose answers are scripted."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2

import outrider
from outrider.deploy.client.sync_client import FieldViolation, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.unit.scripted_service import HANG_GUARD_S, ScriptedService, serving


def test_an_answer_arrives_whole_or_round_by_round(client: OutriderClient) -> None:
    assert client.generate("hi").text == "whole"
    assert [message.text_delta for message in client.stream("hi")] == ["one ", "two"]
    assert client.status().model == "pair"


def test_a_passed_deadline_is_an_error_with_its_code(client: OutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("hang", timeout_s=0.1)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


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
        while not waits():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    def waits() -> bool:
        assert main.ident is not None
        frame = sys._current_frames().get(main.ident)
        while frame is not None and frame.f_code.co_name != "result":
            frame = frame.f_back
        return frame is not None

    main = threading.current_thread()

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


def test_the_application_is_named_only_when_asked(address: str, service: ScriptedService) -> None:
    with OutriderClient(address) as plain:
        plain.generate("hi")
        assert "application" not in service.metadata
    with OutriderClient(address, application="two") as named:
        named.generate("hi")
        assert service.metadata["application"] == "two"


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
        "RevertDrafter": "revert_drafter",
    }
    assert set(pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name) == set(methods)
    assert all(callable(getattr(client, name)) for name in methods.values())


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


def test_a_stream_that_is_dropped_is_cancelled(client: OutriderClient, service: ScriptedService) -> None:
    for message in client.stream("hang"):
        assert message.text_delta == "one "
        break
    gc.collect()
    assert service.cancelled.wait(HANG_GUARD_S)
    assert client._balancer.loads(0.0) == [0.0]


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
