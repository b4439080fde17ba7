"""Connections are counted, on both ports of a proxy: those that are too many are hung up on, by whichever limit."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from outrider.actors.serving import connections
from outrider.actors.serving.connections import Connections, address_of, address_of_call, peer_of, warn_of_few_files
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.certificates import Authority
from tests.unit.proxy_servers import proxy_servers

SOON_S = 60.0
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is counted in Ray's metrics."""
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(connections, "_count_refusal", lambda api, limit: counted.append((api, limit)))
    monkeypatch.setattr(connections, "_open_now", lambda: pytest.fail("told in Ray's metrics"))
    return counted


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Open connections by API, as Ray's metrics have them."""
    counts: dict[str, int] = {}

    class Gauge:
        def set(self, value: float, tags: dict[str, str]) -> None:
            counts[tags["api"]] = int(value)

    monkeypatch.setattr(connections, "_open_now", Gauge)
    return counts


async def connect(port: int, source: str = "127.0.0.1") -> Opened:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))


async def is_hung_up_on(opened: Opened) -> None:
    with suppress(ConnectionResetError):
        while await asyncio.wait_for(opened[0].read(1 << 16), SOON_S):
            pass


async def first_byte(opened: Opened) -> bytes:
    """Empty: there is none, and never will be."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(opened[0].read(1), SOON_S)
    return b""


async def becomes(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - counted by a timer
            await asyncio.sleep(0.02)
    assert condition(), what


async def answered(port: int, source: str = "127.0.0.1") -> int:
    """An HTTP request over a new connection: the status."""
    reader, writer = await connect(port, source)
    writer.write(b"GET /hello HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    try:
        return int((await asyncio.wait_for(reader.readline(), SOON_S)).split()[1])
    finally:
        writer.close()


async def called(port: int) -> grpc.aio.AioRpcError | None:
    """A gRPC call over a new connection, without a retry; what it ended with."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        try:
            await rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(), timeout=SOON_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error
    return None


async def test_http_connections_beyond_the_limit_get_a_503_and_the_place_of_one_that_leaves(monkeypatch, refused, told):
    limits = LimitsConfig(max_connections=3, max_connections_per_peer=3)
    async with proxy_servers(monkeypatch, limits) as (serving, here):
        kept = [await connect(serving.http_port) for _ in range(3)]
        await becomes(lambda: told.get("http") == 3, "three are counted")
        reader, _ = await connect(serving.http_port)
        answer = await asyncio.wait_for(reader.read(), SOON_S)  # to its end, with nothing sent
        assert answer.startswith(b"HTTP/1.1 503")
        assert "limits.max_connections" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert refused == [("http", "max_connections")]
        kept.pop()[1].close()
        await becomes(lambda: len(here.connections["http"]) == 2, "one has left")
        assert await answered(serving.http_port) == 200


async def test_grpc_connections_beyond_the_limit_are_hung_up_on_before_they_have_called(monkeypatch, refused, told):
    limits = LimitsConfig(max_connections=3, max_connections_per_peer=3)
    async with proxy_servers(monkeypatch, limits) as (serving, here):
        kept = [await connect(serving.grpc_port) for _ in range(3)]
        await becomes(lambda: told.get("grpc") == 3, "three are counted")
        await is_hung_up_on(await connect(serving.grpc_port))
        assert refused == [("grpc", "max_connections")]
        assert told == {"grpc": 3, "http": 0}, "each port has its own"
        kept.pop()[1].close()
        await becomes(lambda: len(here.connections["grpc"]) == 2, "one has left")
        assert await called(serving.grpc_port) is None


async def test_a_grpc_connection_that_calls_before_anybody_looks_has_nothing_begun(monkeypatch, refused):
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 3600.0)
    async with proxy_servers(monkeypatch, LimitsConfig(max_connections=2, max_connections_per_peer=1)) as (serving, _):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", options) as channel:
            for _ in range(2):  # the second over the same connection
                await rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(), timeout=SOON_S)
            error = await called(serving.grpc_port)
            assert error is not None
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "limits.max_connections_per_peer" in error.details()
    assert refused == [("grpc", "max_connections_per_peer")]


async def test_a_burst_between_two_looks_is_twice_as_many_at_most(monkeypatch, refused):
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 3600.0)
    async with proxy_servers(monkeypatch, LimitsConfig(max_connections=4)) as (serving, _):
        kept = [await connect(serving.grpc_port) for _ in range(8)]
        for opened in kept:
            assert await first_byte(opened), "gRPC's server speaks first"
        for _ in range(8):
            assert not await first_byte(await connect(serving.grpc_port)), "to whom it talks, it has let in"


@pytest.mark.parametrize("api", ["http", "grpc"])
async def test_one_peer_leaves_room_for_others(monkeypatch, refused, told, api):
    limits = LimitsConfig(max_connections=6, max_connections_per_peer=4)
    async with proxy_servers(monkeypatch, limits) as (serving, _):
        port = serving.http_port if api == "http" else serving.grpc_port
        kept = [await connect(port) for _ in range(4)]
        await becomes(lambda: told.get(api) == 4, "four are counted")
        for _ in range(3):
            await is_hung_up_on(await connect(port))
        other = [await connect(port, "127.0.0.2") for _ in range(2)]
        await becomes(lambda: told.get(api) == 6, "another peer's are there, too")
        assert refused == [(api, "max_connections_per_peer")] * 3
        for _, writer in (*kept, *other):
            assert not writer.is_closing()


async def test_connections_that_never_finish_a_handshake_count_too(monkeypatch, refused, told, tmp_path):
    authority = Authority("ours")
    certificate, key = authority.sign().write(tmp_path, "server")
    limits = LimitsConfig(max_connections=3, max_connections_per_peer=2)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with proxy_servers(monkeypatch, limits, **files) as (serving, _):
        for port, api in ((serving.http_port, "http"), (serving.grpc_port, "grpc")):
            silent = [await connect(port) for _ in range(2)]
            await becomes(lambda api=api: told.get(api) == 2, "two are counted")
            await is_hung_up_on(await connect(port))
            for reader, writer in silent:
                assert not reader.at_eof(), "the newest was given up, and not all for taking so long"
                writer.close()
            await becomes(lambda api=api: told.get(api) == 0, "they have left")
        context = ssl.create_default_context(cadata=authority.certificate.decode())
        reader, writer = await asyncio.open_connection("localhost", serving.http_port, ssl=context)
        writer.write(b"GET /hello HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), SOON_S)).split()[1] == b"200"
    assert refused == [("http", "max_connections_per_peer"), ("grpc", "max_connections_per_peer")]


def test_one_is_counted_once_however_often_it_is_seen():
    counted = []
    here = Connections("grpc", LimitsConfig(max_connections=1), lambda *which: counted.append(which))
    one, two = ("10.0.0.1", 1), ("10.0.0.1", 2)
    assert here.admit(one) is None
    assert here.admit(one) is None
    for _ in range(2):
        assert here.admit(two) == "max_connections"
        assert here.present([one, two]) == [two]
    assert counted == [("grpc", "max_connections")]
    assert here.present([two]) == [], "there is room now"
    assert here.present([]) == []
    assert len(here) == 0


def test_a_site_is_one_peer_and_its_neighbours_are_others():
    assert peer_of(("2001:db8:1:2::5", 1)) == peer_of(("2001:db8:1:2:ffff::9", 2))
    assert peer_of(("2001:db8:1:3::5", 1)) != peer_of(("2001:db8:1:2::5", 1))
    assert peer_of(address_of("::ffff:10.0.0.1", 1)) == peer_of(("10.0.0.1", 2)) == "10.0.0.1"
    assert peer_of(address_of("fe80::1%eth0", 1)) == "fe80::/64"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:40000", ("127.0.0.1", 40000)),
        ("ipv6:%5B2001:db8::1%5D:443", ("2001:db8::1", 443)),
        ("ipv6:[::1]:7", ("::1", 7)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", ("fe80::1", 7)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_a_calls_peer_is_its_connections_address(peer, address):
    assert address_of_call(peer) == address


async def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match=r"max_connections_per_peer \(9\) is above max_connections \(8\)"):
        LimitsConfig(max_connections=8, max_connections_per_peer=9)
    assert LimitsConfig(max_connections=1).most_connections_per_peer == 1


def test_more_connections_than_open_files_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    limits = LimitsConfig(max_connections=2048)
    warn_of_few_files(limits, 6144)
    assert not caplog.records
    warn_of_few_files(limits, 1024)
    assert "limits.max_connections: 2048 on each port may need 6144 open files" in caplog.text
    assert "lower it to 341, or raise 'ulimit -n'" in caplog.text
