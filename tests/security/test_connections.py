"""Attacks by connections and bytes: silent, too many, too large, and not what HTTP or gRPC allows."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import generation_pb2 as pb
from tests.security import attackers as raw
from tests.security.attackers import ELSEWHERE, POST, PREFACE, call, data, exchange, wait_for
from tests.security.conftest import Victim

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.exhaustive  # tests/unit/test_gateway.py has the gateway's side
def test_readers_that_do_not_read_are_cut(victim: Victim) -> None:
    """Over HTTP/2 the windows stay shut, over HTTP/1.1 the socket's buffers are small, and the answers long."""
    gateway = victim.gateway(idle_timeout_s=1, header_timeout_s=1)
    asked = raw.generation(pb.GenerateStreamRequest, max_tokens=900, ignore_eos=True, n=16, temperature=1.0)
    over_grpc = PREFACE + call(raw.STREAM) + data(raw.message(asked.SerializeToString()), raw.END_STREAM)
    body = {"prompt": raw.PROMPT, "max_tokens": 900, "ignore_eos": True, "n": 16, "stream": True, "logprobs": 20}
    content = json.dumps(body).encode()
    over_http = POST + b"content-length: %d\r\n\r\n" % len(content) + content
    with raw.held(
        [raw.connect(port, ELSEWHERE, 2048) for port in (gateway.config.grpc_port, gateway.config.http_port)]
    ) as connections:
        for connection, sent in zip(connections, (over_grpc, over_http), strict=True):
            connection.sendall(sent)

        def answers() -> int:
            load = victim.deployment.status().target
            return load.running + load.waiting

        wait_for(lambda: answers() == 32, "both run")
        victim.caller(gateway).tokens()
        wait_for(lambda: answers() == 0, "both have ended")
        assert b"grpc-status" not in raw.read_all(connections[0])
        assert b"[DONE]" not in raw.read_all(connections[1])


def test_400_idle_callers(victim: Victim) -> None:
    """Connections that say nothing, connections that have said something, and streams that wait for news of health."""
    gateway = victim.gateway(max_connections_per_address=1000, header_timeout_s=5)
    watchers = [victim.caller(gateway, source=ELSEWHERE) for _ in range(4)]
    ask = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    with raw.held(
        [raw.connect(port, ELSEWHERE) for port in (gateway.config.http_port, gateway.config.grpc_port) * 200]
    ) as connections:
        for connection in connections[:200:2]:
            connection.sendall(ask)
        watches = [
            health_pb2_grpc.HealthStub(watcher.channel).Watch(health_pb2.HealthCheckRequest(), timeout=raw.GUARD_S)
            for watcher in watchers
            for _ in range(100)
        ]
        caller = victim.caller(gateway)
        caller.tokens()
        wait_for(lambda: sum(watch.done() for watch in watches) >= 300, "all watches but a hundred are refused")
        assert {watch.code().name for watch in watches if watch.done()} == {"UNAVAILABLE"}
        assert health_pb2_grpc.HealthStub(caller.channel).Check(health_pb2.HealthCheckRequest()).status == 1
        caller.tokens()
        for watch in watches:
            watch.cancel()


def test_too_many_connections_of_one_address_shut_out_that_address_alone(victim: Victim) -> None:
    gateway = victim.gateway(max_connections_per_address=20, header_timeout_s=60)
    connections = []
    for port in (gateway.config.http_port, gateway.config.grpc_port) * 40:
        with suppress(ConnectionResetError):  # of one beyond the limit, where the reset comes before connect returns
            connections.append(raw.connect(port, ELSEWHERE))
    with raw.held(connections):
        greedy = victim.caller(gateway, source=ELSEWHERE)
        assert greedy.code(max_tokens=1) == "UNAVAILABLE"
        with pytest.raises(httpx.TransportError):
            greedy.http.get("/livez")
        victim.caller(gateway).tokens()
    caller = victim.caller(gateway, source=ELSEWHERE)
    wait_for(lambda: caller.code(max_tokens=1) == "OK", "served again once the others are closed")


def test_more_bytes_than_the_limit(victim: Victim) -> None:
    gateway = victim.gateway(max_body_bytes=1 << 20)
    caller = victim.caller(gateway)
    large = [7] * (1 << 20)
    answer = caller.complete(prompt=large)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert caller.code(prompt=large) == "RESOURCE_EXHAUSTED"
    assert caller.code(prompt=large[: 1 << 19]) == "INVALID_ARGUMENT", "it came as far as the model's length"
    # What its length says is looked at before the bytes come.
    sent = PREFACE + call(raw.STREAM) + data(b"\0\x7f\xff\xff\xff" + bytes(40_000))
    assert b"grpc-status\x018" in exchange(gateway.config.grpc_port, sent, until=b"grpc-message")


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        PREFACE + raw.request(b"/v1/completions", method="GET") + data(b"{}", raw.END_STREAM),
    ],
    ids=["chunked and sized", "sized twice", "HTTP/2's GET"],
)
def test_bodies_without_one_length(victim: Victim, sent: bytes) -> None:
    gateway = victim.gateway(header_timeout_s=2, idle_timeout_s=2)
    answer = exchange(gateway.config.http_port, sent)
    assert b" 400 " in answer or b" 411 " in answer or b"Content-Length" in answer
    assert b"choices" not in answer


def test_compressed_bombs(victim: Victim) -> None:
    gateway = victim.gateway()
    bomb = gzip.compress(bytes(200 << 20), 1)
    assert len(bomb) < 1 << 20
    sent = PREFACE + call(raw.GENERATE, (b"grpc-encoding", b"gzip")) + data(raw.message(bomb, True)[:30_000])
    assert b"grpc-status\x0212" in exchange(gateway.config.grpc_port, sent, until=b"grpc-message")
    unsaid = PREFACE + call(raw.GENERATE) + data(raw.message(bomb[:20_000], True), raw.END_STREAM)
    assert b"grpc-status\x0212" in exchange(gateway.config.grpc_port, unsaid, until=b"grpc-message")
    caller = victim.caller(gateway)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/outrider/v1/stream"):
        assert caller.http.post(path, content=bomb, headers=headers).status_code == 400


def test_paths_that_are_not_utf_8(victim: Victim) -> None:
    gateway = victim.gateway(header_timeout_s=1, idle_timeout_s=1)
    for path in (b"/\xff\xfe", b"/outrider.v1.GenerationService/\xff", b"/v1/completions?\xc3"):
        assert b"grpc-status\x0212" in exchange(
            gateway.config.grpc_port, PREFACE + call(path) + data(raw.message(b""), raw.END_STREAM)
        )
        assert b"not valid HTTP" in exchange(
            gateway.config.http_port, PREFACE + raw.request(path, method="GET", flags=5)
        )
        assert b" 400 " in exchange(gateway.config.http_port, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    caller = victim.caller(gateway)
    for path in ("/%ff%fe", "/v1/%ed%a0%80", "/v1/responses/%ff", "/outrider/page/..%2f..%2fapp.py", "/%2e%2e/%00"):
        assert caller.http.get(path).status_code in (400, 404), path
    unknown = caller.channel.unary_unary("/outrider.v1.GenerationService/%ff%fe")
    assert raw.code_of(lambda: unknown(b"", timeout=raw.GUARD_S)) == "UNIMPLEMENTED"
    caller.tokens()
