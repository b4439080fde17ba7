"""The soak's attacks below any call, on both servers of a proxy: what becomes of them, and that nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from tests.bench.soak_attacks import HEADERS, MANY_FIELDS, UPGRADE, Hands, Victim, request
from tests.bench.soak_wires import (
    AT_ONCE,
    HUNG_UP,
    SHOOK,
    handshake,
    path_of_bytes,
    pipeline,
    rapid_reset,
    reset_after_headers,
    trickle,
)
from tests.certificates import Authority
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy

HANG_GUARD_S = 60


@asynccontextmanager
async def attacked(
    monkeypatch: pytest.MonkeyPatch, directory: Path, **limits: float
) -> AsyncIterator[tuple[Hands, Proxy]]:
    """Afterwards a call is answered, and no connection is left but the one that it came by."""
    authority, proxy = Authority(), Proxy()
    certificate, key = authority.sign().write(directory, "server")
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with proxy_servers(monkeypatch, LimitsConfig(**limits), proxy, **tls) as (serving, doors):
        places = f"127.0.0.1:{serving.grpc_port}", f"127.0.0.1:{serving.http_port}"
        hands = Hands(Victim(*places, authority.certificate.decode(), {"open": "outrider_x"}))
        try:
            yield hands, proxy
            async with asyncio.timeout(HANG_GUARD_S):
                assert await hands.call("Generate", request()) == "OK"
                while len(doors.connections["http"]) or len(doors.connections["grpc"]) > 1 or len(doors.awaited):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            await hands.close()


async def test_handshakes_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with attacked(monkeypatch, tmp_path) as (hands, _):
        assert {await handshake(hands) for _ in range(40)} == {SHOOK}


async def test_resets_after_a_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with attacked(monkeypatch, tmp_path) as (hands, _):
        for _ in range(20):
            assert await reset_after_headers(hands) == "reset"


async def test_streams_that_are_opened_and_cancelled_at_once_reach_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with attacked(monkeypatch, tmp_path) as (hands, proxy):
        assert set(await asyncio.gather(*(rapid_reset(hands) for _ in range(4)))) <= {"borne", "sent away", HUNG_UP}
        assert proxy.asked == [], f"of {4 * AT_ONCE} streams"


async def test_a_path_that_is_no_text_is_a_method_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gRPC's own server ends with it, and all calls that are under way."""
    async with attacked(monkeypatch, tmp_path) as (hands, proxy):
        waits = asyncio.create_task(hands.call("Generate", pb.GenerateRequest(request_id="wait")))
        while not proxy.asked:  # noqa: ASYNC110 - the proxy's own count
            await asyncio.sleep(0.01)
        assert {await path_of_bytes(hands) for _ in range(3)} == {"no such method"}
        assert await hands.call("Nope", request()) == "UNIMPLEMENTED"
        proxy.read.release()
        assert await waits == "OK"


async def test_a_pipeline_of_requests_has_a_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with attacked(monkeypatch, tmp_path) as (hands, _):
        assert {await pipeline(hands) for _ in range(4)} == {HUNG_UP}


async def test_a_body_that_trickles_in_chunks_has_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with attacked(monkeypatch, tmp_path, receive_timeout_s=1.5) as (hands, _):
        assert await trickle(hands) == "408"


async def test_headers_have_a_length_and_there_are_no_websockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with attacked(monkeypatch, tmp_path, receive_timeout_s=3600) as (hands, _):
        # Who is still sending may be hung up on before it has read why.
        assert await hands.send(hands.head()[:-2] + MANY_FIELDS, until_s=HANG_GUARD_S) in ("431", HUNG_UP), HEADERS
        assert await hands.send(hands.head()[:-2] + MANY_FIELDS[: 70 << 10], until_s=HANG_GUARD_S) == "431"
        assert await hands.call("Generate", request(), "x" * (64 << 10)) == "RESOURCE_EXHAUSTED"
        assert await hands.send(UPGRADE) == "400"
