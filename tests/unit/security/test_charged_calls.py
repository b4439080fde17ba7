"""Callers who pay for what is refused of theirs, before both of a proxy's real servers: refused before a message or a
body is read, and let in again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sized
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from ray.serve._private.proxy_request_response import gRPCStreamingType
from starlette.responses import JSONResponse

import tests.unit.proxy_servers
from outrider.actors.serving.access import process
from outrider.actors.serving.access.budget import BASE_S, BROKEN_OFF_S, MIB_S, Budget, Payer
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.actors.serving.access.settings import ProxyAccess
from outrider.actors.serving.failures import STATUS_DETAILS_METADATA
from outrider.cluster.config import ServingConfig
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy

GENERATE = "/outrider.v1.GenerationService/Generate"
ADDRESS, OPEN = Payer("address", "127.0.0.1"), Payer("open", "127.0.0.1")
LARGE = LimitsConfig(refused_seconds_per_minute=3600.0)
SMALL = LimitsConfig(refused_seconds_per_minute=2.9 * BASE_S)
"""Of three calls that are refused at once."""

SOON_S = 60.0
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
WITHOUT_END = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HALF = WITHOUT_END + b"content-length: 99\r\n\r\n{"


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Payer, float]]:
    """All that is charged. Nothing comes back meanwhile: how long a test takes is nobody's matter."""
    monkeypatch.setattr(process, "Budget", partial(Budget, clock=lambda: 0.0))
    charged: list[tuple[Payer, float]] = []
    charge = Budget.charge

    def note(budget: Budget, payer: Payer, cost_s: float) -> None:
        charge(budget, payer, cost_s)
        charged.append((payer, cost_s))

    monkeypatch.setattr(Budget, "charge", note)
    return charged


async def comes(found: Sized, number: int) -> None:
    """A client may have its answer before the proxy is done with the call."""
    async with asyncio.timeout(SOON_S):
        while len(found) < number:  # noqa: ASYNC110 - counted by the server
            await asyncio.sleep(0.01)


async def ended(call: Any) -> tuple[str, str]:
    """Its code and its reason."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        packed = dict(error.trailing_metadata() or ()).get(STATUS_DETAILS_METADATA)
        info = error_details_pb2.ErrorInfo()
        if packed is not None:
            assert status_pb2.Status.FromString(packed).details[0].Unpack(info)
        return error.code().name, info.reason
    return "OK", ""


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def http_client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=SOON_S)


async def raw(port: int, data: bytes) -> bytes:
    """The answer, to the connection's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), SOON_S)
    finally:
        writer.close()


async def test_bad_messages_until_none_is_read_any_more(monkeypatch, charges):
    proxy = Proxy()
    async with (
        proxy_servers(monkeypatch, SMALL, proxy) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        for number in range(3):
            assert await ended(channel.unary_unary(GENERATE)(b"\xff", timeout=SOON_S)) == (
                "INVALID_ARGUMENT", "UNDECODABLE_REQUEST"
            )  # fmt: skip
            await comes(charges, number + 1)
        assert {payer for payer, _ in charges} == {ADDRESS}
        assert max(cost_s for _, cost_s in charges) == pytest.approx(BASE_S, rel=0.01)
        silent = channel.stream_stream(GENERATE)(silence(), timeout=SOON_S)
        assert await silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limits.refused_seconds_per_minute" in await silent.details()
        good = channel.unary_unary(GENERATE)(pb.GenerateRequest().SerializeToString(), timeout=SOON_S)
        assert await ended(good) == ("RESOURCE_EXHAUSTED", "REFUSED_TOO_OFTEN")
        check = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SOON_S)
        assert await ended(check) == ("OK", ""), "a probe goes on"
        assert [method for method, _ in proxy.asked] == ["/grpc.health.v1.Health/Check"]
        async with http_client(serving.http_port) as client:
            refused = await client.get("/v1/models")
            assert refused.status_code == 429, "both APIs have one budget"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert (await client.get("/health")).status_code == 200
        assert len(charges) == 3


async def test_what_is_answered_or_not_its_callers_fault_costs_nothing(monkeypatch, charges):
    async with (
        proxy_servers(monkeypatch, SMALL) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
        http_client(serving.http_port) as client,
    ):
        for request_id, ending in (("", "OK"), ("fail", "ALREADY_EXISTS")):
            for _ in range(5):
                message = pb.GenerateRequest(request_id=request_id).SerializeToString()
                assert (await ended(channel.unary_unary(GENERATE)(message, timeout=SOON_S)))[0] == ending
        for _ in range(5):
            assert (await client.post("/v1/completions", json={})).status_code == 200
        assert charges == []


async def test_a_message_costs_by_its_length(monkeypatch, charges):
    limits = LimitsConfig(refused_seconds_per_minute=3600.0, max_request_bytes=1 << 20)
    async with (
        proxy_servers(monkeypatch, limits) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call = channel.unary_unary(GENERATE)(bytes(3 << 19), compression=compression, timeout=SOON_S)
            assert (await ended(call))[1] == "REQUEST_TOO_LARGE"
        await comes(charges, 2)
        call = channel.unary_unary(GENERATE)(bytes(16 << 20), compression=grpc.Compression.Gzip, timeout=SOON_S)
        assert (await ended(call))[0] == "RESOURCE_EXHAUSTED", "gRPC's own end of it"
        await comes(charges, 3)
    assert charges == [(ADDRESS, pytest.approx(BASE_S + 1.5 * MIB_S))] * 2 + [(ADDRESS, BROKEN_OFF_S)]


TAKES_S = 0.05


class Refusing(Proxy):
    """An ingress that finds out late."""

    def make_handler(self, service_method: str, streaming_type: Any) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            await asyncio.sleep(TAKES_S)
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details("text: is no good; send another")
            return b""

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            await unary(request, context)
            for nothing in ():
                yield nothing

        return unary if streaming_type is gRPCStreamingType.UNARY_UNARY else stream


@pytest.mark.parametrize("way", ["Generate", "GenerateStream"])
async def test_the_time_behind_the_proxy_is_paid_for(monkeypatch, charges, way):
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(TAKES_S)
        await JSONResponse({}, status_code=404)(scope, receive, send)

    monkeypatch.setattr(tests.unit.proxy_servers, "_hello", late)
    async with (
        proxy_servers(monkeypatch, LARGE, Refusing()) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
        http_client(serving.http_port) as client,
    ):
        call = channel.stream_stream(f"/outrider.v1.GenerationService/{way}")(iter([b""]), timeout=SOON_S)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await comes(charges, 1)
        assert (await client.post("/v1/completions", json={})).status_code == 404
        await comes(charges, 2)
    assert [cost_s > BASE_S + TAKES_S / 2 for _, cost_s in charges] == [True, True]


async def test_what_is_never_sent_in_full_is_paid_for(monkeypatch, charges):
    limits = LimitsConfig(refused_seconds_per_minute=3600.0, receive_timeout_s=0.5)
    async with (
        proxy_servers(monkeypatch, limits) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        call = channel.stream_stream(GENERATE)(silence(), timeout=SOON_S)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await comes(charges, 1)
        assert (await raw(serving.http_port, HALF)).startswith(b"HTTP/1.1 408")
        await comes(charges, 2)
    assert charges == [(ADDRESS, pytest.approx(BASE_S, rel=0.01))] * 2


async def test_so_is_what_its_caller_leaves_before_that(monkeypatch, charges):
    limits = LimitsConfig(refused_seconds_per_minute=3600.0, receive_timeout_s=600)
    async with (
        proxy_servers(monkeypatch, limits) as (serving, doors),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        left = channel.stream_stream(GENERATE)(silence(), timeout=SOON_S)
        await comes(doors.awaited, 1)
        left.cancel()
        await comes(charges, 1)
        assert not len(doors.awaited)
        _, writer = await asyncio.open_connection("127.0.0.1", serving.http_port)
        writer.write(HALF)
        await comes(doors.awaited, 1)
        writer.close()
        await comes(charges, 2)
    assert charges == [(ADDRESS, BROKEN_OFF_S), (ADDRESS, pytest.approx(BASE_S, rel=0.01))]


async def test_a_body_costs_by_its_length_and_is_not_read_of_who_has_overdrawn(monkeypatch, charges):
    limits = LimitsConfig(refused_seconds_per_minute=2 * MIB_S, max_request_bytes=1 << 20)
    async with proxy_servers(monkeypatch, limits) as (serving, _):
        async with http_client(serving.http_port) as client:
            assert (await client.post("/v1/completions", content=bytes(2 << 20), headers=JSON)).status_code == 413
        await comes(charges, 1)
        assert charges == [(ADDRESS, pytest.approx(BASE_S + 2 * MIB_S))]
        large = await raw(serving.http_port, WITHOUT_END + b"content-length: 1000000\r\n\r\n")
        assert large.startswith(b"HTTP/1.1 429")
        assert b"connection: close" in large.lower()
        async with http_client(serving.http_port) as client:
            small = [await client.post("/v1/completions", json={"prompt": "x" * 1000}) for _ in range(3)]
        assert [answer.status_code for answer in small] == [429] * 3
        assert not any("connection" in answer.headers for answer in small), "the next one needs no new handshake"
    assert len(charges) == 1


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({**JSON, "host": "evil.example.com"}, 421),
        ({**JSON, "origin": "http://evil.example.com"}, 403),
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({**JSON, "content-encoding": "gzip"}, 415),
    ],
)
async def test_other_peoples_pages_do_not_get_past_the_proxy(monkeypatch, charges, headers, status):
    """Where Serve would be, everything gets a 200. Nothing is read of them either."""
    async with proxy_servers(monkeypatch, LARGE) as (serving, _):
        lines = [f"{name}: {value}" for name, value in ({"host": "x"} | headers).items()]
        for path in ("/v1/completions", "/of/an/app/v1/chat/completions", "/tokenize"):
            head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "content-length: 1000000", "", ""])
            answer = await raw(serving.http_port, head.encode())
            assert answer.startswith(f"HTTP/1.1 {status}".encode()), path
        async with http_client(serving.http_port) as client:
            assert (await client.get("/-/healthz", headers={"host": "balancer.example.com"})).status_code == 200
            assert (await client.post("/another", content=b"x", headers={"content-type": "x/y"})).status_code == 200
        await comes(charges, 3)
    assert charges == [(ADDRESS, pytest.approx(BASE_S))] * 3


async def test_a_probe_that_is_bad_pays_for_itself(monkeypatch, charges):
    bad = health_pb2.HealthCheckRequest(service="x" * 10).SerializeToString()[:-1]
    async with (
        proxy_servers(monkeypatch, SMALL) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for number in range(3):
            assert (await ended(check(bad, timeout=SOON_S)))[0] == "INVALID_ARGUMENT"
            await comes(charges, number + 1)
        assert (await ended(check(b"", timeout=SOON_S)))[1] == "REFUSED_TOO_OFTEN"
        good = channel.unary_unary(GENERATE)(b"", timeout=SOON_S)
        assert (await ended(good))[0] == "OK"
    assert charges == [(OPEN, pytest.approx(BASE_S, rel=0.01))] * 3


@pytest.mark.parametrize("off", [0, None])
async def test_it_can_be_switched_off(monkeypatch, charges, off):
    limits = LimitsConfig(refused_seconds_per_minute=off)
    async with (
        proxy_servers(monkeypatch, limits) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", OPTIONS) as channel,
    ):
        for _ in range(10):
            assert (await ended(channel.unary_unary(GENERATE)(b"\xff", timeout=SOON_S)))[0] == "INVALID_ARGUMENT"
    assert charges == []


@pytest.mark.parametrize(
    ("set_to", "without_keys", "with_keys"), [(None, False, True), (0, False, False), (5.0, True, True)]
)
def test_by_default_what_is_refused_is_paid_for_where_keys_are_asked_for(
    monkeypatch, tmp_path, set_to, without_keys, with_keys
):
    """An address alone does not tell a client with a bug from its neighbours."""
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(as_entry(Key(name="k", scopes=("generate",), hash=hash_of(new_secret().encode()))))
    monkeypatch.setattr(process, "from_environment", lambda: LimitsConfig(refused_seconds_per_minute=set_to))
    for keys_file, charges_some in ((None, without_keys), (str(keys), with_keys)):
        access = ProxyAccess.of(ServingConfig(keys_file=keys_file))
        monkeypatch.setattr(process, "proxy_access", lambda access=access: access)
        guard = process.proxy_guard.__wrapped__()
        assert (guard is not None and guard._budget is not None) == charges_some
