"""The Python client where a server refuses, is lost or is one of several: retries, balancing, addresses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.ports import pick_free_port
from tests.unit.scripted_service import FULL, HANG_GUARD_S, LOST, ScriptedService, serving


def test_an_unavailable_replica_is_not_taken_for_an_absent_server(client: OutriderClient) -> None:
    with pytest.raises(OutriderError, match="UNAVAILABLE: the target replica"):
        client.generate("lose")


def test_an_absent_server_is_named_with_the_command_that_starts_one() -> None:
    with OutriderClient("127.0.0.1:1") as client, pytest.raises(OutriderError) as caught:
        client.generate("hi")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert "127.0.0.1:1" in caught.value.message
    assert "outrider serve" in caught.value.message


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
        monkeypatch.setattr(client._closed, "wait", lambda delay_s: waits.append(delay_s) or time.sleep(0.002))
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


def test_a_server_that_speaks_no_tls_is_not_said_to_be_down(address: str) -> None:
    with (
        OutriderClient(address, credentials=grpc.ssl_channel_credentials()) as client,
        pytest.raises(OutriderError, match=r"over TLS at .* or ask without TLS"),
    ):
        client.generate("hi")


def test_no_address_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="address: is empty"):
        OutriderClient([])
