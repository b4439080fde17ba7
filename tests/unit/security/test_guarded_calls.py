"""The guard in front of real calls, in a proxy's gRPC server and in ASGI, before anything of a request is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from ray.serve.generated import serve_pb2
from starlette.requests import Request
from starlette.responses import JSONResponse

from outrider.actors.observability.metrics import IngressMetrics
from outrider.actors.serving.access import process
from outrider.actors.serving.access.calls import GuardedHttp, let_in
from outrider.actors.serving.access.guard import CALLER, Refused
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.actors.serving.access.process import guard_ingress, ingress_guard, proxy_guard
from outrider.actors.serving.access.settings import ProxyAccess, proxy_access
from outrider.actors.serving.openai.errors import refused_by_key
from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy, serving

SECRETS = {"ci": new_secret(), "ops": new_secret()}
SCOPES = {"ci": ("generate",), "ops": ("status",)}
GENERATE = "/outrider.v1.GenerationService/GenerateStream"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    entries = (Key(name=name, hash=hash_of(s.encode()), scopes=SCOPES[name]) for name, s in SECRETS.items())
    path.write_text("".join(map(as_entry, entries)))
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a proxy that asks for keys."""
    access = ProxyAccess.of(ServingConfig(keys_file=str(keys_file)))
    for name, value in access.environment().items():
        monkeypatch.setenv(name, value)
    proxy_access.cache_clear()
    process.proxy_guard.cache_clear()
    yield
    proxy_access.cache_clear()
    process.proxy_guard.cache_clear()


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {SECRETS.get(name, name)}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_proxy_lets_a_call_with_its_key_through_and_no_other(guarded):
    proxy = Proxy()
    async with serving(proxy) as channel:
        stub = rpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest()
        assert await code_of(stub.Generate(request, metadata=bearer("ci"))) is grpc.StatusCode.OK
        assert len(proxy.asked) == 1
        assert await code_of(stub.Generate(request)) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(stub.Generate(request, metadata=bearer("wrong"))) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(stub.Generate(request, metadata=bearer("ops"))) is grpc.StatusCode.PERMISSION_DENIED
        assert len(proxy.asked) == 1


async def test_a_call_without_a_key_ends_before_its_message_has_come(guarded):
    never = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with serving(Proxy()) as channel:
        call = channel.stream_stream(GENERATE)(messages(), timeout=20)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "no key was sent" in await call.details()
        never.set()


async def _app(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    caller = CALLER.get()
    answer = {"bytes": len(body), "caller": caller and caller.key.name}
    await JSONResponse(answer)(scope, receive, send)


def asgi(guard: Any, *, in_proxy: bool) -> httpx.AsyncClient:
    app = GuardedHttp(_app, failed=refused_by_key, guard=guard, in_proxy=in_proxy)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflection_pb2.ServerReflectionRequest),
        ("/ray.serve.RayServeAPIService/ListApplications", serve_pb2.ListApplicationsRequest),
        ("/ray.serve.RayServeAPIService/Healthz", serve_pb2.HealthzRequest),
    ],
)
async def test_what_serve_adds_itself_takes_a_key_for_status(keys_file, monkeypatch, method, request_type):
    streams = "ServerReflection" in method
    request = request_type(list_services="*") if streams else request_type()

    async def code(channel: grpc.aio.Channel, *metadata: Any) -> grpc.StatusCode:
        kind = channel.stream_stream if streams else channel.unary_unary
        call = kind(method, request_serializer=request_type.SerializeToString)
        answer = call(iter([request]) if streams else request, metadata=metadata, timeout=60)
        return await code_of(_all_of(answer) if streams else answer)

    async with (
        proxy_servers(monkeypatch, keys_file=str(keys_file)) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        assert await code(channel) is grpc.StatusCode.UNAUTHENTICATED
        assert await code(channel, *bearer("wrong")) is grpc.StatusCode.UNAUTHENTICATED
        assert await code(channel, *bearer("ci")) is grpc.StatusCode.PERMISSION_DENIED
        assert await code(channel, *bearer("ops")) is grpc.StatusCode.OK
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await code_of(health(b"", timeout=60)) is grpc.StatusCode.OK, "probes have no key"


async def test_reflection_says_what_it_said_without_keys(keys_file, monkeypatch):
    async def listed(metadata: Any, **settings: Any) -> list[str]:
        async with (
            proxy_servers(monkeypatch, **settings) as (serving, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
        ):
            request = reflection_pb2.ServerReflectionRequest(list_services="*")
            call = ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), metadata=metadata, timeout=60)
            return [service.name async for answer in call for service in answer.list_services_response.service]

    names = await listed(bearer("ops"), keys_file=str(keys_file))
    assert "outrider.v1.GenerationService" in names
    assert names == await listed(())


async def _all_of(answers: AsyncIterator[Any]) -> None:
    assert [answer async for answer in answers]


async def test_over_http_a_body_is_not_read_without_a_key(guarded):
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(3):
            read += 1
            yield b"x" * 1000

    async with asgi(proxy_guard, in_proxy=True) as client:
        app = client._transport.app
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was asked for")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "headers": [], "client": ("10.0.0.1", 1)}
        for path in ("/v1/completions", "/", "/outrider/page/v1/completions", "/health"):
            await app({**scope, "path": path}, receive, send)
            start, _ = sent
            assert start["status"] == 401, path
            assert (b"connection", b"close") in start["headers"]
            sent.clear()
        authorised = dict(bearer("ci"))
        answer = await client.post("/v1/completions", content=body(), headers=authorised)
        assert (answer.status_code, answer.json()["bytes"]) == (200, 3000)
        assert (await client.post("/v1/completions", headers=dict(bearer("ops")))).status_code == 403
        for path in ("/health", "/", "/outrider/page/page.js"):
            assert (await client.get(path)).status_code == 200


async def test_streams_without_a_key_do_not_put_a_slow_body_with_one_out(keys_file, monkeypatch):
    async def silence() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    limits = LimitsConfig(max_awaited_requests=4, receive_timeout_s=600)
    async with (
        proxy_servers(monkeypatch, limits, keys_file=str(keys_file)) as (serving, doors),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", [("grpc.enable_http_proxy", 0)]) as channel,
        asyncio.timeout(60),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.http_port)
        fields = {"host": "x", "content-type": "application/json", "content-length": "2", **dict(bearer("ci"))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{{".encode())
        while not len(doors.awaited):  # noqa: ASYNC110 - the door's own count
            await asyncio.sleep(0.01)
        check = channel.stream_stream("/grpc.health.v1.Health/Check")
        silent = [check(silence()) for _ in range(12)]
        codes = [asyncio.ensure_future(call.code()) for call in silent]
        ended = [await code for code in islice(asyncio.as_completed(codes), 9)]
        assert set(ended) == {grpc.StatusCode.RESOURCE_EXHAUSTED}, "three of them are awaited still"
        writer.write(b"}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        for call in silent:
            call.cancel()


async def test_the_ingress_asks_again_whatever_a_proxy_has_done(keys_file, monkeypatch):
    counted = IngressMetrics()
    monkeypatch.setattr(process, "METRICS", counted)  # the process's own has counted for other tests
    guard_ingress(str(keys_file))
    try:
        async with asgi(ingress_guard, in_proxy=False) as client:
            assert (await client.get("/v1/models")).status_code == 401
            answer = await client.get("/v1/models", headers=dict(bearer("ci")))
            assert answer.json()["caller"] == "ci"
        with let_in(Context(bearer("ci")), "Generate"):
            assert CALLER.get().key.name == "ci"
            CALLER.get().used(2, 3)
        with pytest.raises(Refused, match="no key was sent"), let_in(Context(()), "Generate"):
            pass
        text = counted.text()
        assert 'outrider:key_requests_total{key="ci"} 2' in text
        assert 'outrider:key_tokens_total{key="ci",kind="completion"} 3' in text
        assert 'outrider:key_refusals_total{key="-",reason="NO_KEY"} 2' in text
        assert "outrider:keys_stale 0" in text
    finally:
        guard_ingress(None)
    with let_in(Context(()), "Generate"):
        pass


class Context:
    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"


async def test_without_settings_nobody_is_asked():
    proxy_access.cache_clear()
    process.proxy_guard.cache_clear()
    assert proxy_guard() is None
    async with serving(Proxy()) as channel:
        assert await code_of(rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())) is grpc.StatusCode.OK


def test_settings_reach_a_proxy_whole_and_wrong_ones_end_it(tmp_path):
    serving_section = ServingConfig(host="0.0.0.0", keys_file="k.yaml", ssl_certfile="c", ssl_keyfile="k")
    access = ProxyAccess.of(serving_section)
    assert Path(access.keys_file).is_absolute()
    assert ProxyAccess.from_environment(access.environment()) == access
    assert ProxyAccess.from_environment({}) is None
    with pytest.raises(ConfigError, match="OUTRIDER_ACCESS"):
        ProxyAccess.from_environment({"OUTRIDER_ACCESS": "{}"})
