"""The asynchronous Python client against a real gRPC server in this process, whose answers are scripted."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.deploy.client.async_client import AsyncOutriderClient
from outrider.deploy.client.handle import OutriderHandle
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.ports import pick_free_port
from tests.unit.scripted_service import FULL, HANG_GUARD_S, LOST, ScriptedService, serving


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncOutriderClient]:
    async with AsyncOutriderClient(address) as client:
        yield client


async def happens(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, HANG_GUARD_S)


@pytest.mark.parametrize("twin", [AsyncOutriderClient, OutriderHandle])
def test_all_clients_have_the_same_methods_and_options(twin: type) -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
        return {
            name: [(each.name, each.default) for each in inspect.signature(method).parameters.values()]
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name != "close"
        }

    assert methods(twin) == methods(OutriderClient)


async def test_an_answer_arrives_whole_or_round_by_round(client: AsyncOutriderClient) -> None:
    assert (await client.generate("hi")).text == "whole"
    async with client.stream("hi") as rounds:
        assert [message.text_delta async for message in rounds] == ["one ", "two"]
    messages = [{"role": "user", "content": "hi"}]
    assert (await client.chat(messages)).text == "whole"
    assert [message.text_delta async for message in client.stream_chat(messages)] == ["one ", "two"]


async def test_everything_else_the_api_has(client: AsyncOutriderClient, service: ScriptedService) -> None:
    assert (await client.status()).model == "pair"
    assert (await client.tokenize("a b", add_special_tokens=False)).count == 2
    assert (await client.detokenize([1, 2])).text == "text"
    assert (await client.model_info()).vocab_size == 300
    assert (await client.server_info()).outrider_version == "0.1.0"
    assert await client.abort("r-running") is True
    assert await client.abort("r-over") is False
    assert await client.healthy() is True
    service.health = health_pb2.HealthCheckResponse.NOT_SERVING
    assert await client.healthy() is False


async def test_requests_are_those_of_the_synchronous_client(
    client: AsyncOutriderClient, address: str, service: ScriptedService
) -> None:
    options = {"temperature": 0.0, "seed": 3, "timeout_s": 30.0, "verification": "coupled", "request_id": "r"}
    await client.generate("hi", **options)
    with OutriderClient(address) as twin:
        twin.generate("hi", **options)
    assert service.requests[0] == service.requests[1]
    assert service.deadline_s is not None


async def test_errors_are_those_of_the_synchronous_client(client: AsyncOutriderClient) -> None:
    with pytest.raises(OutriderError) as caught:
        await client.generate("refuse")
    error = caught.value
    assert (error.code, error.request_id) == (grpc.StatusCode.INVALID_ARGUMENT, "r-1")
    assert [violation.field for violation in error.field_violations] == ["sampling.temperature"]
    stream = client.stream("break")
    assert (await anext(stream)).text_delta == "one "
    for _ in range(2):
        with pytest.raises(OutriderError, match="INTERNAL: request r failed"):
            await anext(stream)
    with pytest.raises(OutriderError, match=r"sampling\.n: "):
        await client.generate("hi", n=-1)


async def test_a_passed_deadline_is_an_error_with_its_code(client: AsyncOutriderClient) -> None:
    with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
        await client.generate("hang", timeout_s=0.1)


async def test_cancelling_the_task_that_waits_cancels_the_request(
    client: AsyncOutriderClient, service: ScriptedService
) -> None:
    waiting = asyncio.create_task(client.generate("hang"))
    assert await happens(service.started)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await happens(service.cancelled)
    assert client._balancer.loads(0.0) == [0.0]


async def test_cancelling_the_task_that_reads_cancels_the_request(
    client: AsyncOutriderClient, service: ScriptedService
) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("hang"):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    assert not service.cancelled.is_set()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await happens(service.cancelled)
    assert client._balancer.loads(0.0) == [0.0]


async def test_a_timeout_around_a_call_cancels_the_request(
    client: AsyncOutriderClient, service: ScriptedService
) -> None:
    async def passes(limit: asyncio.Timeout) -> None:
        assert await happens(service.started)
        limit.reschedule(0.0)

    with pytest.raises(TimeoutError):  # noqa: PT012 - of the wait within
        async with asyncio.timeout(None) as limit:
            passing = asyncio.create_task(passes(limit))
            await client.generate("hang")
    await passing
    assert await happens(service.cancelled)


async def test_closing_a_stream_cancels_the_request(client: AsyncOutriderClient, service: ScriptedService) -> None:
    async with client.stream("hang") as stream:
        await anext(stream)
        assert not service.cancelled.is_set()
    assert await happens(service.cancelled)
    assert [message async for message in stream] == []


async def test_closing_a_stream_ends_the_wait_of_its_reader(
    client: AsyncOutriderClient, service: ScriptedService
) -> None:
    stream = client.stream("hang")
    await anext(stream)
    reading = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await asyncio.wait_for(reading, HANG_GUARD_S) is None


async def test_a_stream_that_is_dropped_is_cancelled(client: AsyncOutriderClient, service: ScriptedService) -> None:
    stream = client.stream("hang")
    await anext(stream)
    del stream
    gc.collect()
    assert await happens(service.cancelled)
    assert client._balancer.loads(0.0) == [0.0]


async def test_closing_the_client_ends_waiting_calls(client: AsyncOutriderClient, service: ScriptedService) -> None:
    waiting = asyncio.create_task(client.generate("hang"))
    assert await happens(service.started)
    await client.close()
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        await asyncio.wait_for(waiting, HANG_GUARD_S)
    with pytest.raises(OutriderError, match="CANCELLED: the client was closed"):
        await client.generate("hi")


async def test_an_absent_server_is_named_with_the_command_that_starts_one() -> None:
    async with AsyncOutriderClient("127.0.0.1:1") as client:
        with pytest.raises(OutriderError) as caught:
            await client.generate("hi")
        assert await client.healthy(timeout_s=1.0) is False
    assert "127.0.0.1:1" in caught.value.message
    assert "outrider serve" in caught.value.message


@pytest.mark.parametrize("failure", [LOST, FULL], ids=lambda failure: failure.code.name)
async def test_retries_wait_as_long_as_the_server_says(
    address: str, service: ScriptedService, failure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    async with AsyncOutriderClient(address, retries=1) as client:
        monkeypatch.setattr("outrider.deploy.client.async_client.asyncio.sleep", sleep)
        service.failing = [failure]
        assert (await client.generate("hi")).text == "whole"
        service.failing = [failure]
        assert len([message async for message in client.stream("hi")]) == 2
        service.failing = [failure, failure]
        with pytest.raises(OutriderError) as caught:
            await client.generate("hi")
    assert [delay_s for delay_s in waits if delay_s] == [1.0, 1.0, 1.0]
    assert caught.value.code is failure.code


async def test_a_stream_that_has_begun_is_not_sent_again(address: str, service: ScriptedService) -> None:
    async with AsyncOutriderClient(address, retries=3) as client:
        stream = client.stream("lose")
        await anext(stream)
        with pytest.raises(OutriderError, match="UNAVAILABLE"):
            await anext(stream)
    assert len(service.requests) == 1


async def test_several_servers_share_the_calls(address: str, service: ScriptedService) -> None:
    other = ScriptedService()
    other.running = {"r-there"}
    with serving(other) as second:
        async with AsyncOutriderClient([address, second]) as client:
            await asyncio.gather(*(client.generate("hi") for _ in range(4)))
            assert (len(service.requests), len(other.requests)) == (2, 2)
            assert await client.abort("r-there") is True
            assert await client.abort("r-nowhere") is False
    async with AsyncOutriderClient([f"127.0.0.1:{pick_free_port()}", address], retries=1) as client:
        assert (await client.generate("hi")).text == "whole"
        assert await client.healthy()
        with pytest.raises(OutriderError, match="no server answers"):
            await client.abort("r-nowhere")


def test_it_can_be_made_before_there_is_an_event_loop(address: str) -> None:
    client = AsyncOutriderClient(address)

    async def ask() -> str:
        async with client:
            return (await client.generate("hi")).text

    assert asyncio.run(ask()) == "whole"
