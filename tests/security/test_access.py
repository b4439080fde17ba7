"""Attacks on who may ask: missing keys, certificates, requests of others, forged headers, ways around the gateway."""

from __future__ import annotations

import hashlib
import os
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.routing import Route

from outrider.actors.serving.authentication import OWNER_HEADER, TOKEN_HEADER, TOKEN_VARIABLE, Authenticator
from outrider.actors.serving.http.app import UNGUARDED, build_http_app
from outrider.actors.serving.openai.forward import OpenAIForwarder
from outrider.cluster.config import parse_config
from outrider.deploy.keys import Key, as_yaml, hash_of, new_secret
from outrider.v1 import generation_pb2 as pb
from tests.security import attackers as raw
from tests.security.attackers import ELSEWHERE, GUARD_S, HERE, PROMPT, Caller, code_of, wait_for
from tests.security.conftest import Victim
from tests.support.certificates import Authority

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

IDS = ("grpc-mine", "http-mine")
"""Ids of the requests that run."""

LONG = {"max_tokens": 900, "ignore_eos": True}
METHODS = {
    method.name: f"/{service.full_name}/{method.name}" for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}  # fmt: skip


def http_routes() -> list[tuple[str, str]]:
    """Method and path of everything that the ingress serves."""
    anything: Any = MagicMock()
    forwarder = OpenAIForwarder(anything, anything, parse_config({"target": {"model": "model"}}, "test"))
    app = build_http_app(anything, Authenticator(), forwarder, anything, None, anything)
    routes = [route for route in app.routes if isinstance(route, Route)]  # the page's files are mounted
    return sorted((method, route.path) for route in routes for method in route.methods or ())


def write_keys(path: Path, **secrets: tuple[str, datetime | None]) -> None:
    entries = [Key(name=name, hash=hash_of(secret), expires=expires) for name, (secret, expires) in secrets.items()]
    fresh = path.with_suffix(".new")
    fresh.write_text(as_yaml(entries))
    fresh.chmod(0o600)
    fresh.replace(path)


class Streams:
    """Answers that run, one by each API, and what came of them."""

    def __init__(self, caller: Caller, **fields: Any) -> None:
        self.tokens: list[list[int]] = [[], []]
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._read, args=(index, part), daemon=True)
            for index, part in enumerate(
                (
                    self._over_grpc(caller, {**fields, "request_id": IDS[0]}),
                    self._over_http(caller, {**fields, "request_id": IDS[1]}),
                )
            )
        ]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: all(self.tokens) or self.errors, "both streams begin")

    def _read(self, index: int, parts: Iterator[list[int]]) -> None:
        try:
            for part in parts:
                self.tokens[index] += part
        except (grpc.RpcError, httpx.HTTPError, AssertionError) as error:
            self.errors.append(error)

    @staticmethod
    def _over_grpc(caller: Caller, fields: dict[str, Any]) -> Iterator[list[int]]:
        for each in caller.stream(**fields):
            yield list(each.token_ids)

    @staticmethod
    def _over_http(caller: Caller, fields: dict[str, Any]) -> Iterator[list[int]]:
        body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, "stream": True, **fields}
        with caller.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield httpx.Response(200, text=line[6:]).json()["choices"][0].get("token_ids") or []

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def whole(self, expected: list[int]) -> None:
        for thread in self._threads:
            thread.join(GUARD_S)
        assert not self.running
        assert not self.errors
        assert self.tokens == [expected, expected]


def test_no_key_no_answer_on_any_route(victim: Victim, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", one=(new_secret(), None))
    caller = victim.caller(victim.gateway(keys_file=str(tmp_path / "keys")))
    base = str(caller.http.base_url).rstrip("/")  # which httpx would join to a path that begins with two slashes
    routes = [*http_routes(), ("GET", "/-/routes"), ("GET", "/docs"), ("GET", "/metrics"), ("POST", "/v1/embeddings")]
    for method, path in [*routes, *((method, f"/{path}") for method, path in routes if len(path) > 1)]:
        open_to_all = method in ("GET", "HEAD") and (path in UNGUARDED or path.startswith("/outrider/page/"))
        content = b"{}" if method == "POST" else None
        status = caller.http.request(method, f"{base}{path}", content=content).status_code
        assert status == (200 if open_to_all else 401), (method, path)
    assert len(routes) > 25
    assert "GenerateStream" in METHODS
    for path in [*METHODS.values(), "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/no.such/Method"]:
        ask = caller.channel.unary_unary(path)
        assert code_of(lambda ask=ask: ask(b"", timeout=GUARD_S)) == "UNAUTHENTICATED", path
    health = health_pb2_grpc.HealthStub(caller.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=GUARD_S).status == 1
    assert "" in health.List(health_pb2.HealthListRequest(), timeout=GUARD_S).statuses


def test_tls_port_without_tls_or_without_a_certificate(victim: Victim, tmp_path: Path) -> None:
    authority, other = Authority(), Authority("other")
    certificate, key = authority.sign().write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(tmp_path / "ca.pem")}
    gateway = victim.gateway(tls=tls, header_timeout_s=1, idle_timeout_s=1)
    for port, sent in (
        (gateway.config.http_port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
        (gateway.config.grpc_port, raw.PREFACE),
    ):
        assert b"HTTP" not in raw.exchange(port, sent)
    for signer, ends in ((None, "UNAVAILABLE"), (other, "UNAVAILABLE"), (authority, "OK")):
        context = ssl.create_default_context(cadata=authority.certificate.decode())
        shown: tuple[bytes | None, bytes | None] = (None, None)
        if signer is not None:
            signed = signer.sign("client")
            context.load_cert_chain(*signed.write(tmp_path, f"client {ends}"))
            shown = signed.private_key, signed.certificate
        credentials = grpc.ssl_channel_credentials(authority.certificate, *shown)
        caller = victim.caller(gateway, tls=context, credentials=credentials)
        assert caller.code(max_tokens=1) == ends
        if ends == "OK":
            caller.tokens()
        else:
            with pytest.raises(httpx.TransportError):
                caller.http.get("/livez")


def test_another_address_cannot_end_a_request(victim: Victim) -> None:
    """Nor with forged headers."""
    gateway = victim.gateway()
    token = os.environ[TOKEN_VARIABLE]
    owner = hashlib.sha256(f"{HERE}-{token}".encode()).hexdigest()
    caller, thief = victim.caller(gateway), victim.caller(gateway, source=ELSEWHERE)
    headers = {OWNER_HEADER: owner, TOKEN_HEADER: token, "x-forwarded-for": HERE}
    expected = list(victim.caller().generate(**LONG).token_ids)
    streams = Streams(caller, **LONG)

    def aborted(by: Caller) -> list[bool]:
        metadata = tuple(headers.items())
        asked = [pb.AbortRequestRequest(request_id=each) for each in IDS]
        return [by.stub.AbortRequest(each, timeout=GUARD_S, metadata=metadata).aborted for each in asked]

    assert aborted(thief) == [False, False]
    for path in ("/v1/responses/http-mine", "/v1/responses/resp_http-mine"):
        assert thief.http.post(f"{path}/cancel", headers=headers).status_code == 404
        assert thief.http.get(path, headers=headers).status_code == 404
    # The same id of another owner is another request, and ending that one ends no other.
    namesake = Streams(thief, **LONG)
    assert aborted(thief) == [True, True]
    assert streams.running, "this machine is too fast for the test: make the answers longer"
    streams.whole(expected)
    wait_for(lambda: not namesake.running, "what was aborted ends")


def test_nobody_learns_what_others_have_asked(victim: Victim) -> None:
    """Each address is told of the prefixes that it has sent itself, and of no others."""
    gateway = victim.gateway()
    prompt = [(n * 7) % 250 for n in range(600)]

    def over_grpc(caller: Caller) -> int:
        return caller.generate(prompt=prompt, max_tokens=1).usage.cached_tokens

    def over_completions(caller: Caller) -> int:
        usage = caller.complete(prompt=prompt, max_tokens=1).json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def over_responses(caller: Caller) -> int:
        answer = caller.http.post("/v1/responses", json={"input": "over and over " * 30, "max_output_tokens": 1})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["input_tokens_details"]["cached_tokens"]

    for number, ask in enumerate((over_grpc, over_completions, over_responses)):
        first = victim.caller(gateway, source=HERE)
        ask(first)
        assert ask(victim.caller(gateway, source=f"127.0.0.{40 + number}")) == 0
    assert over_grpc(victim.caller(gateway, source=HERE)) > 0


def test_a_way_around_the_gateway(victim: Victim) -> None:
    (_, http_port), (_, grpc_port) = victim.backends
    headers = {OWNER_HEADER: "a" * 64, TOKEN_HEADER: "a" * 64}
    caller = victim.caller(SimpleNamespace(config=SimpleNamespace(http_port=http_port, grpc_port=grpc_port)))
    for method, path in http_routes():
        if path not in UNGUARDED and not path.startswith("/outrider/page/"):
            for extra in ({}, headers):
                assert caller.http.request(method, path, headers=extra).status_code == 403, (method, path)
    for name, path in METHODS.items():
        ask = caller.channel.unary_unary(path)
        for metadata in ((), tuple(headers.items())):
            assert code_of(lambda ask=ask, m=metadata: ask(b"", timeout=GUARD_S, metadata=m)) == "PERMISSION_DENIED", (
                name
            )
    assert (
        health_pb2_grpc.HealthStub(caller.channel).Check(health_pb2.HealthCheckRequest(), timeout=GUARD_S).status == 1
    )
