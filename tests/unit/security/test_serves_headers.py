"""Headers and metadata that are Serve's own, from strangers: what reads them in Serve finds nothing of them."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from ray.serve._private import http_util
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
)
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest, gRPCProxyRequest, gRPCStreamingType
from ray.serve._private.utils import DEFAULT
from starlette.responses import JSONResponse

import tests.unit.proxy_servers
from outrider.v1 import generation_pb2 as pb
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy

GENERATE = "/outrider.v1.GenerationService/Generate"
MADE_UP = "made up"
JSON = (b"content-type", b"application/json")
CONTROLS = [
    (name, value)
    for name in (
        "x-request-disconnect-disabled",
        "x-request-timeout-seconds",
        "serve_multiplexed_model_id",
        "Serve-Multiplexed-Model-Id",
        "x-session-id",
        "X_Session_Id",
        "x-serve-router-replica",
    )
    for value in (b"?1", b"7", b"\xff")
]


async def reads(scope: Any, receive: Any, send: Any) -> None:
    """As Serve's proxy reads a header. Without a handle, whose options it would change."""
    headers = dict(scope["headers"])
    assert not parse_disconnect_disabled_header(headers)
    assert parse_request_timeout_header(headers, None) is None
    request = ASGIProxyRequest(scope, receive, send)
    _, request_id = HTTPProxy.setup_request_context_and_handle(None, "app", None, "/", request, "internal")
    await JSONResponse({"id": request_id, "kept": headers[b"x-kept"].decode()})(scope, receive, send)


@pytest.mark.parametrize(("name", "value"), CONTROLS)
async def test_no_client_steers_serve_by_a_header(monkeypatch: pytest.MonkeyPatch, name: str, value: bytes) -> None:
    monkeypatch.setattr(tests.unit.proxy_servers, "_hello", reads)
    async with proxy_servers(monkeypatch) as (serving, _), client(serving.http_port) as http:
        headers = [(name.encode(), value), (b"x-request-id", b"mine"), (b"x-kept", b"yes")]
        for answer in (
            await http.get("/health", headers=headers),
            await http.post("/v1/completions", headers=[*headers, JSON], content=b"{}"),
        ):
            assert (answer.status_code, answer.json()) == (200, {"id": "mine", "kept": "yes"})


@pytest.mark.parametrize("sent", [[b"\xff"], [b"a, b"], [b""], [b"x" * 129], [b"fine", b"\xff"]])
async def test_a_request_id_that_is_none_does_not_reach_serve(
    monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    monkeypatch.setattr(tests.unit.proxy_servers, "_hello", RequestIdMiddleware(reads))  # Serve's own is the innermost
    monkeypatch.setattr(http_util, "generate_request_id", lambda: MADE_UP)
    async with proxy_servers(monkeypatch) as (serving, _), client(serving.http_port) as http:
        headers = [(b"x-request-id", value) for value in sent]
        answer = await http.post("/v1/completions", headers=[*headers, JSON], content=b"{}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "request_id"
        assert "connection" not in answer.headers, "the next one needs no new handshake"
        for path in ("/health", "/metrics", "/v1/models"):
            answer = await http.get(path, headers=[*headers, (b"x-kept", b"yes")])
            assert (answer.status_code, answer.json()) == (200, {"id": MADE_UP, "kept": "yes"}), path


def client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)


class Reading(Proxy):
    """Reads metadata as Serve's proxy does."""

    def make_handler(self, service_method: str, streaming_type: Any) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            self.asked.append(gRPCProxyRequest(request, context, service_method, stream=False))
            return b""

        return unary if streaming_type is gRPCStreamingType.UNARY_UNARY else None


@pytest.mark.parametrize(("sent", "kept"), [("mine", "mine"), ("a b", None), ("x" * 129, None)])
async def test_nor_by_metadata(monkeypatch: pytest.MonkeyPatch, sent: str, kept: str | None) -> None:
    proxy = Reading()
    async with (
        proxy_servers(monkeypatch, proxy=proxy) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}", [("grpc.enable_http_proxy", 0)]) as channel,
    ):
        steering = [("multiplexed_model_id", "m"), ("session_id", "s"), ("request_id", sent), ("application", "a")]
        await channel.unary_unary(GENERATE)(pb.GenerateRequest().SerializeToString(), metadata=steering, timeout=60)
    (read,) = proxy.asked
    assert (read.multiplexed_model_id, read.session_id) == (DEFAULT.VALUE, DEFAULT.VALUE)
    assert (read.request_id, read.app_name) == (kept, "a")
