"""Serve's own start of its servers, with our address and TLS put in: what its proxies call, without Ray."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from ray.serve._private import default_impl, http_util
from ray.serve._private.grpc_util import start_grpc_server
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse

from outrider.actors.serve_seam.listening import listen_as_configured
from outrider.actors.serve_seam.options import proxy_options
from outrider.actors.serving.access.settings import ProxyAccess
from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.limits import LimitsConfig
from outrider.deploy.ports import pick_free_port
from outrider.deploy.probe import Probe
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.certificates import Authority, Signed
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy

OURS, FOREIGN = Authority("ours"), Authority("foreign")


async def _app(scope: Any, receive: Any, send: Any) -> None: ...


@dataclass
class Started:
    serving: ServingConfig

    async def grpc(self, shown: Signed | None) -> grpc.StatusCode:
        pair = (shown.private_key, shown.certificate) if shown else (None, None)
        credentials = grpc.ssl_channel_credentials(OURS.certificate, *pair)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        address = f"localhost:{self.serving.grpc_port}"
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            try:
                await rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(), timeout=30)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    async def http(self, directory: Path, shown: Signed | None) -> int | None:
        context = ssl.create_default_context(cadata=OURS.certificate.decode())
        if shown is not None:
            context.load_cert_chain(*shown.write(directory, "client"))
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            try:
                return (await client.get(f"https://localhost:{self.serving.http_port}/", timeout=30)).status_code
            except httpx.TransportError:
                return None


@asynccontextmanager
async def started(
    monkeypatch: pytest.MonkeyPatch, limits: LimitsConfig | None = None, **settings: Any
) -> AsyncIterator[Started]:
    async with proxy_servers(monkeypatch, limits, **settings) as (serving, _):
        yield Started(serving)


def listening(*ports: int) -> set[tuple[str, int]]:
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)  # gRPC binds IPv4 by its IPv6 name
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port in ports
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
async def test_both_ports_listen_where_host_says_and_nowhere_else(monkeypatch, host):
    async with started(monkeypatch, host=host) as server:
        ports = server.serving.grpc_port, server.serving.http_port
        await asyncio.to_thread(_until_listening, *ports)
        assert listening(*ports) == {(host, port) for port in ports}
        await asyncio.to_thread(Probe(server.serving).check)


def _until_listening(*ports: int) -> None:
    from tests.serving import wait_until

    wait_until(lambda: len(listening(*ports)) == len(ports), 60, "both ports")


@pytest.mark.parametrize(("believed", "address"), [(None, "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
async def test_nobody_chooses_an_address_that_others_pay_for(monkeypatch, believed, address):
    """uvicorn takes loopback's word for it by default."""

    async def who(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    monkeypatch.setattr("tests.unit.proxy_servers._hello", who)
    if believed is None:
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    else:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", believed)
    async with started(monkeypatch) as server, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{server.serving.http_port}/"
        assert (await client.get(url, headers={"x-forwarded-for": "203.0.113.7"})).text == address


async def test_serves_own_ports_are_found_out(monkeypatch):
    """Without our functions, gRPC listens everywhere: start-up refuses."""
    serves = default_impl.add_grpc_address
    async with started(monkeypatch) as server:
        loop, port = asyncio.get_running_loop(), pick_free_port()
        options = proxy_options(ServingConfig(grpc_port=port))["grpc_options"]
        with monkeypatch.context() as patch:
            patch.setattr(default_impl, "add_grpc_address", serves)
            task, serves_own = await start_grpc_server(Proxy().make_handler, options, event_loop=loop)
        try:
            wrong = Probe(server.serving.model_copy(update={"grpc_port": port}))
            with pytest.raises(ConfigError, match=rf"serving.host: is 127.0.0.1, but serving.grpc_port \({port}\)"):
                await asyncio.to_thread(wrong.check)
        finally:
            await serves_own.stop(None)
            await task


async def test_both_ports_speak_tls_and_ask_for_certificates_that_change(monkeypatch, tmp_path):
    certificate, key = OURS.sign().write(tmp_path, "server")
    authorities = tmp_path / "clients.pem"
    authorities.write_bytes(OURS.certificate)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key), "ssl_ca_certs": str(authorities)}
    async with started(monkeypatch, **files) as server:
        friend, stranger = OURS.sign("friend"), FOREIGN.sign("friend")
        assert await server.grpc(friend) is grpc.StatusCode.OK
        assert await server.http(tmp_path, friend) == 200
        for other in (None, stranger):
            assert await server.grpc(other) is grpc.StatusCode.UNAVAILABLE
            assert await server.http(tmp_path, other) is None
        assert await asyncio.to_thread(Probe(server.serving).missing) is None
        await asyncio.to_thread(Probe(server.serving).check)
        authorities.write_bytes(FOREIGN.certificate)
        await asyncio.sleep(1.1)  # files are looked at once a second
        assert await server.grpc(friend) is grpc.StatusCode.UNAVAILABLE
        assert await server.http(tmp_path, friend) is None
        assert await server.grpc(stranger) is grpc.StatusCode.OK
        assert await server.http(tmp_path, stranger) == 200


async def test_a_handshake_that_is_not_begun_is_not_waited_for_for_ever(monkeypatch, tmp_path):
    """Half of one neither; others come in meanwhile."""
    certificate, key = OURS.sign().write(tmp_path, "server")
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with started(monkeypatch, LimitsConfig(receive_timeout_s=1.0), **files) as server:
        assert await server.http(tmp_path, None) == 200
        for said in (b"", bytes.fromhex("1603010200010001fc0303")):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.serving.http_port)
            writer.write(said)
            assert await asyncio.wait_for(reader.read(), 30) == b""  # sooner than a handshake's usual minute
            writer.close()
        assert await server.http(tmp_path, None) == 200


async def test_tls_that_serves_http_options_do_not_have_is_refused(monkeypatch, tmp_path):
    certificate, key = OURS.sign().write(tmp_path, "server")
    access = ProxyAccess(host="127.0.0.1", ssl_certfile=str(certificate), ssl_keyfile=str(key))
    for module, name in ((default_impl, "add_grpc_address"), (http_util, "uvicorn")):
        monkeypatch.setattr(module, name, getattr(module, name))
    listen_as_configured(access)
    options = HTTPOptions(host="127.0.0.1", port=pick_free_port())
    with pytest.raises(ConfigError, match=r"serving.ssl_certfile: Serve's HTTP options have no ssl_certfile"):
        await http_util.start_asgi_http_server(_app, options, event_loop=asyncio.get_running_loop())
