"""Callers who hold on to a gRPC door and do nothing: none of them keeps anybody else out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from outrider.actors.serving.failures import STATUS_DETAILS_METADATA
from outrider.actors.serving.gate import CAPACITY_METADATA, MOST_REFLECTING, Gates
from outrider.actors.serving.grpc import door
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.unit.scripted_proxy import Proxy, channel_to, from_another_address, limit, serving, serving_port

CALLERS = 400
CHECK = health_pb2.HealthCheckRequest()


@pytest.fixture(autouse=True)
def own_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def how(call: Any) -> tuple[grpc.StatusCode, str]:
    """Its code and its reason."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall | grpc.aio.StreamUnaryCall):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        status = status_pb2.Status.FromString(dict(error.trailing_metadata())[STATUS_DETAILS_METADATA])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        return error.code(), info.reason
    return grpc.StatusCode.OK, ""


async def how_written(make: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """As how, of a call that is still written to when it ends. gRPC's client may know nothing of its end then, but that
    a message could not be sent: such a call is made again."""
    while True:
        with suppress(KeyError):
            return await how(make())


def silent_calls(channel: grpc.aio.Channel, number: int) -> list[Any]:
    path = "/outrider.v1.GenerationService/GenerateStream"
    return [channel.stream_stream(path)(silence(), timeout=300) for _ in range(number)]


async def test_silent_streams_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, receive_timeout_s=0.5)
    async with serving(proxy := Proxy()) as channel:
        ends = await asyncio.gather(*map(how, silent_calls(channel, 20)))
    assert set(ends) == {(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")}
    assert not proxy.asked


async def test_four_hundred_silent_streams_and_one_that_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are waited for; those that were silent longest are not."""
    doors = limit(monkeypatch, max_awaited_requests=100, receive_timeout_s=600)
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "2")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest())
        silent = silent_calls(channel, CALLERS)
        while len(doors.awaited) < 100:  # noqa: ASYNC110 - the door's own count
            await asyncio.sleep(0.01)
        assert await how(stub.Generate(pb.GenerateRequest())) == (grpc.StatusCode.OK, "")
        ended, _ = await asyncio.wait([asyncio.ensure_future(how(call)) for call in silent[:50]], timeout=60)
        assert {task.result() for task in ended} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TIMEOUT")}
        assert len(ended) == 50
        assert len(doors.awaited) <= 100
        for call in silent:
            call.cancel()


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
async def test_an_answer_that_is_not_read_holds_no_place(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """All of it has been generated: what is left is between proxy and reader."""
    limit(monkeypatch, unread_timeout_s=600, max_unread_bytes=1 << 30)
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "1")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest())
        for _ in range(3):
            path = f"/outrider.v1.GenerationService/{way}"
            unread = channel.stream_stream(path)(iter([pb.GenerateRequest(request_id="huge").SerializeToString()]))
            while not any(_is_huge(request) for _, request in proxy.asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert await how(stub.Generate(pb.GenerateRequest())) == (grpc.StatusCode.OK, "")
            unread.cancel()
            proxy.asked.clear()


async def test_a_reader_that_never_reads_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not over, nor too large: one message that does not leave is enough."""
    limit(monkeypatch, unread_timeout_s=1.2, max_unread_bytes=1 << 30, max_awaited_bytes=1 << 30)
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "1")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest())
        unread = stub.GenerateStream(pb.GenerateStreamRequest(request_id="flood"))
        await asyncio.wait_for(proxy.cancelled.wait(), 60)
        await asyncio.sleep(0.1)
        assert await how(stub.Generate(pb.GenerateRequest())) == (grpc.StatusCode.OK, "")
        assert await how(unread) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


def _is_huge(request: Any) -> bool:
    return getattr(request, "request_id", "").startswith("huge")


async def test_what_all_readers_leave_unread_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, unread_timeout_s=600, max_awaited_bytes=80 << 20, max_unread_bytes=1 << 30)
    async with serving(proxy := Proxy()) as channel:
        stub = rpc.GenerationServiceStub(channel)
        unread = [stub.GenerateStream(pb.GenerateStreamRequest(request_id="flood")) for _ in range(2)]  # 48 MiB each
        await asyncio.wait_for(proxy.cancelled.wait(), 60)
        ends = [asyncio.ensure_future(how(call)) for call in unread]
        (given_up,), (other,) = await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert given_up.result() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
        other.cancel()


async def test_status_pollers_have_their_turns_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_control_calls_per_s=1, control_timeout_s=1.0)
    async with serving(proxy := Proxy()) as channel:
        stub, health = rpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)

        async def poll() -> set[tuple[grpc.StatusCode, str]]:
            return {await how(stub.GetServerStatus(pb.GetServerStatusRequest())) for _ in range(2)}

        polls = [asyncio.create_task(poll()) for _ in range(CALLERS)]
        await asyncio.sleep(0.3)
        generated = [await how(stub.Generate(pb.GenerateRequest(text=str(n)))) for n in range(5)]
        checked = await how(health.Check(CHECK))
        ends = set().union(*await asyncio.gather(*polls))
    assert set(generated) == {(grpc.StatusCode.OK, "")}
    assert checked == (grpc.StatusCode.OK, "")
    assert ends == {(grpc.StatusCode.OK, ""), (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")}
    passed_on = sum(method.endswith("GetServerStatus") for method, _ in proxy.asked)
    assert passed_on < CALLERS / 2


async def test_watch_streams_have_a_number_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_watch_streams=5, max_watch_streams_per_peer=5)
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "1")]
    async with serving(proxy) as channel:
        stub, health = rpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(CHECK) for _ in range(5)]
        for watch in watches:
            await watch.read()
        more = [await how(health.Watch(CHECK)) for _ in range(3)]
        assert set(more) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")}
        assert await how(health.Check(CHECK)) == (grpc.StatusCode.OK, "")
        assert await how(stub.Generate(pb.GenerateRequest())) == (grpc.StatusCode.OK, "")
        watches.pop().cancel()
        while (again := health.Watch(CHECK)) and await again.read() is grpc.aio.EOF:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for watch in (*watches, again):
            watch.cancel()


async def test_one_address_has_half_of_the_watch_streams_and_another_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_watch_streams=8)
    async with serving_port(Proxy()) as port, channel_to(port) as greedy, from_another_address(port) as other:
        health = health_pb2_grpc.HealthStub(greedy)
        watches = [health.Watch(CHECK) for _ in range(4)]
        for watch in watches:
            await watch.read()
        assert await how(health.Watch(CHECK)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        watch = health_pb2_grpc.HealthStub(other).Watch(CHECK)
        assert await watch.read() is not grpc.aio.EOF
        watches[0].cancel()
        while (again := health.Watch(CHECK)) and await again.read() is grpc.aio.EOF:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for call in (*watches, watch, again):
            call.cancel()


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVES_OWN = "/ray.serve.RayServeAPIService"


@pytest.mark.parametrize("path", [REFLECTION, f"{SERVES_OWN}/Healthz", f"{SERVES_OWN}/ListApplications"])
async def test_nor_is_a_message_waited_for_that_serve_answers_itself(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    limit(monkeypatch, receive_timeout_s=0.5)
    async with serving(proxy := Proxy()) as channel:
        ended = await how(channel.stream_stream(path)(silence(), timeout=60))
    assert ended == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")
    assert not proxy.asked


async def test_who_asks_about_the_api_asks_as_often_as_for_status_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, max_control_calls_per_s=1, control_timeout_s=0.01)
    question = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    async with serving(Proxy()) as channel:
        asked = lambda: channel.stream_stream(REFLECTION)(iter([question] * 100), timeout=60)  # noqa: E731
        assert await how_written(asked) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    limit(monkeypatch, receive_timeout_s=1.0, max_control_calls_per_s=10_000)
    async with serving(Proxy()) as channel:

        async def on_and_on() -> AsyncIterator[bytes]:
            while True:
                yield question
                await asyncio.sleep(0.05)

        endless = lambda: channel.stream_stream(REFLECTION)(on_and_on(), timeout=60)  # noqa: E731
        assert await how_written(endless) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")


async def test_silent_streams_of_questions_keep_no_other_address_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, receive_timeout_s=600)
    question = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    async with serving_port(Proxy()) as port, channel_to(port) as greedy, from_another_address(port) as other:
        silent = [greedy.stream_stream(REFLECTION)(silence(), timeout=600) for _ in range(2 * MOST_REFLECTING)]
        refused = [asyncio.ensure_future(how(call)) for call in silent]
        while sum(task.done() for task in refused) < 3 * MOST_REFLECTING // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ended = {task.result() for task in refused if task.done()}
        assert ended == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")}
        assert await how(other.stream_stream(REFLECTION)(iter([question]), timeout=60)) == (grpc.StatusCode.OK, "")
        assert sum(not task.done() for task in refused) == MOST_REFLECTING // 2
        for call in silent:
            call.cancel()
        await asyncio.gather(*refused, return_exceptions=True)
