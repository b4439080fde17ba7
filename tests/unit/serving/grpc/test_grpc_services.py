"""What the proxy does around the ingress, on Serve's own gRPC server with scripted handlers behind it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.actors.serving.failures import REQUEST_ID_METADATA, STATUS_DETAILS_METADATA
from outrider.actors.serving.gate import CAPACITY_METADATA, REFUSED, Doors, Gates
from outrider.actors.serving.grpc import door
from outrider.actors.serving.grpc.door import FEW_BYTES
from outrider.actors.serving.grpc.wire import SMALL_BYTES
from outrider.actors.serving.ways_out import PROXY
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.unit.scripted_proxy import BIG, HUGE, Proxy, limit, router, sent_on, serving


async def ended(call: Any) -> None:
    """Wait for the end of a call of either kind. Raises its error."""
    if isinstance(call, grpc.aio.UnaryUnaryCall | grpc.aio.StreamUnaryCall):
        await call
        return
    async for _ in call:
        pass


def trailing(call: Any) -> dict[str, Any]:
    return dict(call or ())


def reason(metadata: dict[str, Any]) -> str:
    status = status_pb2.Status.FromString(metadata[STATUS_DETAILS_METADATA])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


async def test_both_services_reach_their_handlers_by_name() -> None:
    proxy = Proxy()
    async with serving(proxy) as channel:
        await rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(request_id="a"))
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="s"))
    assert [method for method, _ in proxy.asked] == [
        "/outrider.v1.GenerationService/Generate",
        "/grpc.health.v1.Health/Check",
    ]
    assert [type(request).__name__ for _, request in proxy.asked] == ["GenerateRequest", "HealthCheckRequest"]


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x1a\x02\xc3\x28"], ids=["no protobuf", "no UTF-8"])
async def test_what_does_not_decode_is_the_clients_fault(way: str, data: bytes) -> None:
    proxy = Proxy()
    async with serving(proxy) as channel:
        path = f"/outrider.v1.GenerationService/{way}"
        call = channel.unary_unary(path) if way == "Generate" else channel.unary_stream(path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(call(data))
        assert not (await rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())).text
    error = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"request: what was sent is no outrider.v1.{way}Request; send")
    assert reason(trailing(error.trailing_metadata())) == "UNDECODABLE_REQUEST"
    assert len(proxy.asked) == 1, "nothing of it came in"


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
async def test_a_client_that_sends_nothing_is_not_left_waiting(way: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    proxy = Proxy()
    async with serving(proxy) as channel:
        path = f"/outrider.v1.GenerationService/{way}"
        call = channel.stream_unary(path) if way == "Generate" else channel.stream_stream(path)
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was sent") as caught:
            await ended(call(nothing(), timeout=30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not proxy.asked


async def test_a_request_that_is_far_too_large_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_request_bytes=1024)
    proxy = Proxy()
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="1028 bytes are too many; send at most 1024") as caught:
            await stub.Generate(pb.GenerateRequest(text="x" * 1025))
        await stub.Generate(pb.GenerateRequest(text="x" * 900))
    assert reason(trailing(caught.value.trailing_metadata())) == "REQUEST_TOO_LARGE"
    assert len(proxy.asked) == 1


async def test_a_failure_has_its_sentence_and_its_details_where_they_belong() -> None:
    async with serving(Proxy()) as channel:
        stub = rpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Generate(pb.GenerateRequest(request_id="fail"))
        call = stub.GenerateStream(pb.GenerateStreamRequest(request_id="fail"))
        assert (await call.read()).text_delta == "first"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await call.read()
    for error in (unary.value, streamed.value):
        assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "taken")
        metadata = trailing(error.trailing_metadata())
        assert reason(metadata) == "REQUEST_ID_IN_USE"
        assert metadata[REQUEST_ID_METADATA] == "r-1"


async def test_a_failure_whose_metadata_came_through_with_a_message_is_told_the_same_way() -> None:
    async with serving(Proxy()) as channel:
        call = rpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(request_id="fail at once"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ended(call)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.ALREADY_EXISTS, "taken")
    assert reason(trailing(failed.value.trailing_metadata())) == "REQUEST_ID_IN_USE"


async def test_a_call_that_went_well_keeps_its_metadata() -> None:
    async with serving(Proxy()) as channel:
        call = rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())
        await call
        metadata = trailing(await call.trailing_metadata())
    assert metadata["kept"] == "yes"
    assert STATUS_DETAILS_METADATA not in metadata


async def test_a_slow_reader_is_given_up_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_unread_bytes=1 << 20)
    proxy = Proxy()
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        slow = stub.GenerateStream(pb.GenerateStreamRequest(request_id="flood"))
        await asyncio.wait_for(proxy.cancelled.wait(), 30)
        assert proxy.sent < 500, "the answer was read to its end"
        quick = [m.text_delta async for m in stub.GenerateStream(pb.GenerateStreamRequest(request_id="a"))]
        assert quick == ["whole"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(slow)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason(trailing(caught.value.trailing_metadata())) == "SLOW_READER"


async def test_a_reader_that_keeps_up_may_read_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, max_unread_bytes=4 << 20)
    async with serving(proxy := Proxy()) as channel:
        call = rpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(request_id="paced"))
        for _ in range(500):
            assert (await call.read()).text_delta == BIG
            proxy.read.release()
        call.cancel()
        await asyncio.wait_for(proxy.cancelled.wait(), 30)


@pytest.mark.parametrize("most", [None, 1 << 16])
async def test_one_message_may_be_as_large_as_it_is(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if most is not None:
        limit(monkeypatch, max_unread_bytes=most)
    async with serving(Proxy()) as channel:
        stub = rpc.GenerationServiceStub(channel)
        sizes = [len(m.text_delta) async for m in stub.GenerateStream(pb.GenerateStreamRequest(request_id="huge"))]
    assert sizes == [5, len(HUGE), 4]


async def test_a_reader_that_stops_is_given_up_though_nothing_more_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport takes the first few messages; what waits behind them does not become fewer."""
    limit(monkeypatch, unread_timeout_s=0.2)
    proxy = Proxy()
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(pb.GenerateStreamRequest(request_id="huge twice, then a stall"))
        await asyncio.wait_for(proxy.cancelled.wait(), 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended(call)
    assert reason(trailing(caught.value.trailing_metadata())) == "SLOW_READER"


async def test_a_reader_that_stops_is_given_up_when_the_answer_is_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_up = asyncio.Event()

    class Watched(door.Unread):
        def _give_up(self) -> None:
            super()._give_up()
            gave_up.set()

    limit(monkeypatch, unread_timeout_s=0.2)
    monkeypatch.setattr(door, "Unread", Watched)
    async with serving(Proxy()) as channel:
        call = rpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(request_id="huge twice"))
        await asyncio.wait_for(gave_up.wait(), 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(ended(call), 30)
    assert reason(trailing(caught.value.trailing_metadata())) == "SLOW_READER"


async def test_a_backlog_that_shrinks_is_waited_for_and_one_that_does_not_is_not() -> None:
    slow = 0

    def on_slow() -> None:
        nonlocal slow
        slow += 1

    unread = door.Unread(on_slow, Doors(LimitsConfig()), "a")
    for _ in range(3):
        unread.put(b"x" * (5 << 20))
    assert unread._judging is not None
    await unread.get()
    unread._judge()
    assert not slow, "there are fewer than there were"
    assert not unread.given_up
    unread.put(b"x")
    unread._judge()
    assert (slow, unread.given_up) == (1, True), "there are more than there were"
    unread.put(b"x")
    unread.close()
    assert await unread.get() is None, "nothing is kept of a call that was given up"
    unread.stop_watching()


async def test_a_client_that_leaves_is_noticed_while_nothing_is_written() -> None:
    async with serving(proxy := Proxy()) as channel:
        call = rpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(request_id="hang"))
        await call.read()
        call.cancel()
        await asyncio.wait_for(proxy.cancelled.wait(), 30)


async def test_beyond_the_capacity_that_an_answer_told_generations_are_refused_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))
    proxy = Proxy()
    proxy.read = asyncio.Semaphore(0)
    proxy.told = [(CAPACITY_METADATA, "2")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        held = [stub.Generate(pb.GenerateRequest(request_id="wait")) for _ in range(2)]
        while len(proxy.asked) < 3:  # noqa: ASYNC110 - another task's list
            await asyncio.sleep(0.001)
        for call in (stub.Generate(pb.GenerateRequest()), stub.GenerateStream(pb.GenerateStreamRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ended(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason(trailing(caught.value.trailing_metadata())) == "QUEUE_FULL"
        assert len(proxy.asked) == 3, "a refused call went on"
        await health.Check(health_pb2.HealthCheckRequest())
        for made_up in ("outrider", "another", "a third"):  # which Serve sends to the only application that there is
            with pytest.raises(grpc.aio.AioRpcError, match="queue is full"):
                await stub.Generate(pb.GenerateRequest(), metadata=(("application", made_up),))
        assert len(proxy.asked) == 4
        proxy.read.release()
        proxy.read.release()
        await asyncio.gather(*held)
        await stub.Generate(pb.GenerateRequest())


async def test_each_application_has_a_gate_and_a_name_that_is_none_has_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))
    limit(monkeypatch, max_control_calls_per_s=1, control_timeout_s=0.01)
    proxy = Proxy()
    proxy.proxy_router = router(one="/one", two="/two")
    proxy.read = asyncio.Semaphore(0)
    proxy.told = [(CAPACITY_METADATA, "2")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for name in ("one", "two"):
            await stub.Generate(pb.GenerateRequest(), metadata=(("application", name),))
        waits = pb.GenerateRequest(request_id="wait")
        held = [stub.Generate(waits, metadata=(("application", name),)) for name in ("one", "two") * 2]
        while len(proxy.asked) < 6:  # noqa: ASYNC110 - another task's list
            await asyncio.sleep(0.001)
        for name in ("one", "two"):
            with pytest.raises(grpc.aio.AioRpcError, match="queue is full"):
                await stub.Generate(waits, metadata=(("application", name),))
        await stub.Generate(pb.GenerateRequest(), metadata=(("application", "neither"),))  # Serve says that it is not
        made_up = [stub.Generate(pb.GenerateRequest(), metadata=(("application", f"made up {n}"),)) for n in range(10)]
        ends = [error for error in await asyncio.gather(*made_up, return_exceptions=True) if error is not None]
        assert any("no turn for calls for status" in str(error) for error in ends)
        for _ in held:
            proxy.read.release()
        await asyncio.gather(*held)


class KeepingProxy(Proxy):
    """Its handlers keep what they were given until the answer is over, as Serve's do."""

    def make_handler(self, service_method: str, streaming_type: Any) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            self.asked.append(sent_on(request).text)
            await self.read.acquire()
            return b"" if request is None else pb.GenerateResponse(text="whole").SerializeToString()

        return unary


async def test_a_request_is_gone_from_the_proxy_when_it_has_been_sent_on() -> None:
    proxy = KeepingProxy()
    proxy.read = asyncio.Semaphore(0)
    async with serving(proxy) as channel:
        call = channel.unary_unary("/outrider.v1.GenerationService/Generate")
        held = call(pb.GenerateRequest(request_id="only here", text="x" * (4 << 20)).SerializeToString())
        while not proxy.asked:  # noqa: ASYNC110 - another task's list
            await asyncio.sleep(0.001)
        assert len(proxy.asked[0]) == 4 << 20
        gc.collect()
        kept = [message for message in gc.get_objects() if type(message) is pb.GenerateRequest]
        assert "only here" not in [message.request_id for message in kept]
        proxy.read.release()
        assert await held


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/grpc.health.v1.Health/Check", FEW_BYTES),
        ("/grpc.health.v1.Health/Watch", FEW_BYTES),
        ("/outrider.v1.GenerationService/GetServerStatus", FEW_BYTES),
        ("/ray.serve.RayServeAPIService/Healthz", FEW_BYTES),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", FEW_BYTES),
        ("/outrider.v1.GenerationService/AbortRequest", SMALL_BYTES),
    ],
)
async def test_a_call_that_says_little_brings_little(path: str, most: int) -> None:
    """An unknown field: what decodes it keeps it, and a few bytes become megabytes of it."""

    def unknown(num_bytes: int) -> bytes:
        field = pb.SamplingParameters(stop=["x" * num_bytes]).SerializeToString()
        return b"\xfa\x7f" + field[1:]  # another number, 2047

    proxy = Proxy()
    async with serving(proxy) as channel:
        call = channel.stream_stream(path)(iter([unknown(8 << 20)]), compression=grpc.Compression.Gzip, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match=f"bytes are too many for a .* send at most {most}") as caught:
            await ended(call)
        assert reason(trailing(caught.value.trailing_metadata())) == "REQUEST_TOO_LARGE"
        assert not proxy.asked
        call = channel.stream_stream(path)(iter([unknown(most - 10)]), timeout=60)
        async for _ in call:
            break  # it was answered
        call.cancel()


async def test_the_next_call_that_is_let_in_tells_of_those_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))
    proxy = Proxy()
    proxy.read = asyncio.Semaphore(0)
    proxy.told = [(CAPACITY_METADATA, "1")]
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest())
        held = stub.Generate(pb.GenerateRequest(request_id="wait"))
        while len(proxy.asked) < 2:  # noqa: ASYNC110 - another task's list
            await asyncio.sleep(0.001)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb.GenerateRequest())
        proxy.read.release()
        await held
        forged = ((REFUSED, "1000"), ("kept", "yes"))
        for _ in range(2):
            await stub.Generate(pb.GenerateRequest(), metadata=forged)
        await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=forged)
    told = [[value for key, value in metadata if key == REFUSED] for metadata in proxy.metadata]
    assert told == [[], [], ["3"], [], []], "once, and what a client writes is no number of refusals"
    assert all(("kept", "yes") in metadata for metadata in proxy.metadata[2:])


async def test_a_generation_is_told_which_proxy_it_came_through_whatever_its_client_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy, forged = Proxy(), ((PROXY, "another one"),)
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(), metadata=forged)  # no actor of Ray's: there is nothing to say
        monkeypatch.setattr(door, "this_process", lambda: "this one")
        await stub.Generate(pb.GenerateRequest(), metadata=forged)
        await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=forged)
    told = [[value for key, value in metadata if key == PROXY] for metadata in proxy.metadata]
    assert told == [[], ["this one"], []]


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
async def test_a_client_that_has_not_sent_its_request_takes_no_place(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "2")]
    sending = asyncio.Event()

    async def later() -> AsyncIterator[bytes]:
        await sending.wait()
        yield pb.GenerateRequest().SerializeToString()

    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest())
        path = f"/outrider.v1.GenerationService/{way}"
        open_call = channel.stream_unary(path) if way == "Generate" else channel.stream_stream(path)
        silent = [open_call(later(), timeout=60) for _ in range(5)]
        for call in silent:  # written behind the others on the same connection: when it is answered, they have begun
            await call.wait_for_connection()
        for _ in range(3):
            await stub.Generate(pb.GenerateRequest())
        sending.set()
        for call in silent:  # one after the other goes on, and has a place when it needs one
            with suppress(grpc.aio.AioRpcError):
                await ended(call)
        codes = [await call.code() for call in silent]
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert codes.count(grpc.StatusCode.OK) >= 2
