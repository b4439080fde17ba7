"""The Python clients for threads and for asyncio against a real gRPC server in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.deploy.client.async_client import AsyncOutriderClient
from outrider.deploy.client.sync_client import API_KEY_VARIABLE, OutriderClient, OutriderError
from outrider.deploy.ports import pick_free_port
from tests.unit.scripted_service import FULL, HANG_GUARD_S, LOST, ScriptedService, serving


@pytest.fixture
async def aclient(address: str) -> AsyncIterator[AsyncOutriderClient]:
    async with AsyncOutriderClient(address) as client:
        yield client


async def happens(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, HANG_GUARD_S)


async def test_an_answer_arrives_whole_or_round_by_round(client: OutriderClient, aclient: AsyncOutriderClient) -> None:
    assert client.generate("hi").text == (await aclient.generate("hi")).text == "whole"
    assert [message.text_delta for message in client.stream("hi")] == ["one ", "two"]
    async with aclient.stream("hi") as rounds:
        assert [message.text_delta async for message in rounds] == ["one ", "two"]
    assert await aclient.abort("r-running") is True


async def test_an_error_has_code_field_and_request(client: OutriderClient, aclient: AsyncOutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        client.generate("refuse", request_id="mine")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature")
        assert error.request_id == "mine"
        assert str(error) == "INVALID_ARGUMENT: sampling.temperature: -1.0 is out of range; send more"
    with pytest.raises(OutriderError) as other:
        await aclient.generate("refuse", request_id="mine")
    assert other.value.args == caught.value.args
    stream = client.stream("break")
    assert next(stream).text_delta == "one ", "what was sent before the error comes before it"
    with pytest.raises(OutriderError, match="INTERNAL: request r failed"):
        next(stream)
    with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
        client.generate("hang", timeout_s=0.1)
    with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
        await aclient.generate("hang", timeout_s=0.1)


@pytest.mark.parametrize("end", ["close", "drop"])
async def test_a_stream_that_is_closed_or_dropped_is_cancelled(
    client: OutriderClient, aclient: AsyncOutriderClient, service: ScriptedService, end: str
) -> None:
    stream = client.stream("hang")
    next(stream)
    assert not service.cancelled.is_set()
    if end == "close":
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    assert await happens(service.cancelled)
    service.cancelled.clear()
    astream = aclient.stream("hang")
    await anext(astream)
    assert not service.cancelled.is_set()
    if end == "close":
        reading = asyncio.create_task(anext(astream, None))
        await asyncio.sleep(0)
        await astream.aclose()
        assert await asyncio.wait_for(reading, HANG_GUARD_S) is None
    del astream
    gc.collect()
    assert await happens(service.cancelled)


def test_an_interrupted_wait_cancels_the_request(client: OutriderClient, service: ScriptedService) -> None:
    def press() -> None:
        assert service.started.wait(HANG_GUARD_S)
        while not waits(sys._current_frames()[threading.main_thread().ident or 0]):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def waits(frame: FrameType | None) -> bool:
        return frame is not None and (frame.f_code.co_name == "result" or waits(frame.f_back))

    # A shell starts what it puts in the background with SIGINT ignored, CI among it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            client.generate("hang")
    finally:
        signal.signal(signal.SIGINT, before)
    pressing.join()
    assert caught.tb is not None, "it keeps the call from being collected, which would cancel it too"
    assert service.cancelled.wait(HANG_GUARD_S)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
async def test_cancelling_the_task_that_waits_cancels_the_request(
    aclient: AsyncOutriderClient, service: ScriptedService, streaming: bool
) -> None:
    async def ask() -> None:
        if not streaming:
            await aclient.generate("hang")
        async for _ in aclient.stream("hang"):
            pass

    waiting = asyncio.create_task(ask())
    assert await happens(service.started)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await happens(service.cancelled)


async def test_closing_the_client_ends_waiting_calls(
    client: OutriderClient, aclient: AsyncOutriderClient, service: ScriptedService
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hang")
        assert await happens(service.started)
        client.close()
        with pytest.raises(OutriderError, match="CANCELLED"):
            waiting.result(HANG_GUARD_S)
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        client.stream("hi")
    service.started.clear()
    asking = asyncio.create_task(aclient.generate("hang"))
    assert await happens(service.started)
    await aclient.close()
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        await asyncio.wait_for(asking, HANG_GUARD_S)


async def test_health_is_yes_or_no(
    client: OutriderClient, aclient: AsyncOutriderClient, service: ScriptedService
) -> None:
    assert client.healthy() is (await aclient.healthy()) is True
    for service.health in (health_pb2.HealthCheckResponse.NOT_SERVING, grpc.StatusCode.NOT_FOUND):
        assert client.healthy() is (await aclient.healthy()) is False


def test_an_absent_server_is_named_with_the_command_that_starts_one() -> None:
    with OutriderClient("127.0.0.1:1") as client:
        assert client.healthy() is False
        with pytest.raises(OutriderError, match=r"no server answers at 127\.0\.0\.1:1; start one with 'outrider"):
            client.generate("hi")


@pytest.mark.parametrize("failure", [LOST, FULL], ids=lambda failure: failure[0].name)
async def test_grpc_sends_again_what_failed_before_its_first_message(
    address: str, service: ScriptedService, failure: tuple[grpc.StatusCode, str]
) -> None:
    with OutriderClient(address, retries=1) as client:
        service.failing = [failure]
        assert client.generate("hi").text == "whole"
        service.failing = [failure]
        assert len(list(client.stream("hi"))) == 2
        service.failing = [failure, failure]
        with pytest.raises(OutriderError, match=failure[0].name):
            client.generate("hi")
        assert len(service.requests) == 6
        stream = client.stream("lose")
        assert next(stream).text_delta == "one "
        with pytest.raises(OutriderError, match="UNAVAILABLE"):
            next(stream)
        assert len(service.requests) == 7
    async with AsyncOutriderClient(address, retries=1) as aclient:
        service.failing = [failure]
        assert (await aclient.generate("hi")).text == "whole"
    with OutriderClient(address) as client:
        service.failing = [failure]
        with pytest.raises(OutriderError, match=failure[1]):
            client.generate("hi")
    assert len(service.requests) == 10, "nothing is sent twice unless asked for"


async def test_several_servers_take_turns_and_one_that_is_gone_is_passed_over(
    address: str, service: ScriptedService
) -> None:
    other = ScriptedService()
    with serving(other) as second, OutriderClient([address, second]) as client:
        while not (service.requests and other.requests):  # until it has reached both
            client.generate("hi")
        before = len(service.requests), len(other.requests)
        for _ in range(4):
            client.generate("hi")
        assert (len(service.requests) - before[0], len(other.requests) - before[1]) == (2, 2)
    gone = f"127.0.0.1:{pick_free_port()}"
    async with AsyncOutriderClient([gone, address]) as aclient:
        assert [(await aclient.generate("hi")).text for _ in range(3)] == ["whole"] * 3


def test_a_call_waits_for_a_server_where_asked() -> None:
    port = pick_free_port()
    with OutriderClient(f"127.0.0.1:{port}", wait_for_ready=True) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hi", timeout_s=HANG_GUARD_S)
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        with serving(ScriptedService(), port):
            assert waiting.result(HANG_GUARD_S).text == "whole"


def test_metadata_and_the_key_go_with_every_call(
    address: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(**options: object) -> tuple[str | None, str | None]:
        with OutriderClient(address, **options) as client:  # type: ignore[arg-type]
            client.generate("hi")
        return service.metadata.get("application"), service.metadata.get("authorization")

    assert sent() == (None, None)
    assert sent(application="two", api_key="k") == ("two", "Bearer k")
    monkeypatch.setenv(API_KEY_VARIABLE, "of-the-environment")
    assert sent() == (None, "Bearer of-the-environment")
    assert sent(metadata=[("authorization", "Basic x")]) == (None, "Basic x")
    with pytest.raises(ValueError, match="api_key"):
        sent(api_key="a b")


def test_credentials_make_the_connection_a_secure_one(service: ScriptedService) -> None:
    """gRPC's credentials for connections within one machine stand for TLS: a client without any is not let in."""
    secure, local = grpc.local_server_credentials(), grpc.local_channel_credentials()
    with serving(service, credentials=secure) as address, OutriderClient(address, credentials=local) as client:
        assert client.generate("hi").text == "whole"
    with pytest.raises(ValueError, match="without TLS only"):
        OutriderClient(["127.0.0.1:1", "127.0.0.1:2"], credentials=local)


@pytest.mark.parametrize("address", ["http://h:9000", "h", "h:x", "", [], ["h:1", "g:2"], ["127.0.0.1:1", "[::1]:1"]])
def test_what_is_no_address_is_a_mistake_of_the_caller(address: str) -> None:
    with pytest.raises(ValueError, match=r"^address: .*write host:port without a scheme"):
        AsyncOutriderClient(address)
