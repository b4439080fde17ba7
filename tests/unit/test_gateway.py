"""The gateway: a real HAProxy in front of a small HTTP server and a small gRPC server, without Ray."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.actors.serving.openai.rollouts import ROUTES
from outrider.cluster.config import GatewayConfig
from outrider.cluster.config_section import ConfigError
from outrider.deploy.gateway import Gateway
from outrider.deploy.keys import Key, as_yaml, hash_of
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.certificates import Authority

TOKEN = "0123456789abcdef" * 4
PATIENCE_S = 20.0


class Handler(BaseHTTPRequestHandler):
    """Answers with the headers that it got, ``/held`` when released."""

    protocol_version = "HTTP/1.1"
    server: HttpBackend

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/held":
            self.server.arrived.release()
            assert self.server.released.wait(PATIENCE_S)
        answer = json.dumps({"headers": dict(self.headers.items()), "body": len(body)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


class HttpBackend(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.arrived, self.released = threading.Semaphore(0), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Service(rpc.GenerationServiceServicer):
    """Streams messages until ``ends``; unary calls answer when ``released``."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.arrived, self.ends, self.released = threading.Semaphore(0), threading.Event(), threading.Event()
        self.left = threading.Event()
        self.released.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.metadata = dict(context.invocation_metadata())
        self.arrived.release()
        await asyncio.to_thread(self.released.wait)
        return pb.GenerateResponse()

    async def GetServerStatus(self, request: pb.GetServerStatusRequest, context: Any) -> pb.GetServerStatusResponse:
        self.arrived.release()
        await asyncio.to_thread(self.released.wait)
        return pb.GetServerStatusResponse()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Any:
        self.arrived.release()
        try:
            while not self.ends.is_set():
                yield pb.GenerateStreamResponse()
                await asyncio.sleep(0.02)
        finally:
            self.left.set()


class Front:
    """A gateway with both backends."""

    def __init__(self, **config: Any) -> None:
        self.http_backend, self.service, started = HttpBackend(), Service(), threading.Event()

        async def serve() -> None:
            self._stopped = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            server = grpc.aio.server()
            rpc.add_GenerationServiceServicer_to_server(self.service, server)
            health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
            self._grpc_port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            started.set()
            await self._stopped.wait()
            await server.stop(0)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)
        self.config = GatewayConfig(http_port=0, grpc_port=0, **config)
        http_port = self.http_backend.server_address[1]
        self.gateway = Gateway(self.config, TOKEN, ("127.0.0.1", http_port), ("127.0.0.1", self._grpc_port))
        self.gateway.start()
        self._channels: list[grpc.Channel] = []

    def stop(self) -> None:
        for channel in self._channels:
            channel.close()
        self.gateway.stop()
        self.http_backend.released.set()
        self.http_backend.shutdown()
        self.http_backend.server_close()
        self.service.released.set()
        self.service.ends.set()
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(PATIENCE_S)

    def channel(self, credentials: grpc.ChannelCredentials | None = None, **options: int) -> grpc.Channel:
        address = f"localhost:{self.gateway.config.grpc_port}"
        # A subchannel of its own each, as of another client.
        arguments = [("grpc.use_local_subchannel_pool", 1), *((f"grpc.{name}", n) for name, n in options.items())]
        channel = (
            grpc.insecure_channel(address, arguments)
            if credentials is None
            else grpc.secure_channel(address, credentials, arguments)
        )
        self._channels.append(channel)
        return channel

    def stub(self, credentials: grpc.ChannelCredentials | None = None) -> rpc.GenerationServiceStub:
        return rpc.GenerationServiceStub(self.channel(credentials))

    def http(self, tls: ssl.SSLContext | None = None, port: int | None = None) -> http.client.HTTPConnection:
        address = ("127.0.0.1", port or self.gateway.config.http_port)
        if tls is None:
            return http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        return http.client.HTTPSConnection(*address, timeout=PATIENCE_S, context=tls)

    def get(self, path: str, tls: ssl.SSLContext | None = None, port: int | None = None, **headers: str) -> Answer:
        return self.request("GET", path, None, tls, port, **headers)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        tls: ssl.SSLContext | None = None,
        port: int | None = None,
        **headers: str,
    ) -> Answer:
        connection = self.http(tls, port)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, response.read(), dict(response.getheaders()))
        finally:
            connection.close()


class Answer:
    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.status, self.body, self.headers = status, body, headers

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def echoed(self) -> dict[str, str]:
        """Headers that the backend got."""
        return {name.lower(): value for name, value in json.loads(self.body)["headers"].items()}


@pytest.fixture
def serve() -> Iterator[Callable[..., Front]]:
    fronts: list[Front] = []

    def start(**config: Any) -> Front:
        fronts.append(Front(**config))
        return fronts[-1]

    yield start
    for front in fronts:
        front.stop()


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK, ""


def generate(stub: rpc.GenerationServiceStub, secret: str | None = None) -> tuple[grpc.StatusCode, str]:
    metadata = [("authorization", f"Bearer {secret}")] if secret else []
    return status_of(lambda: stub.Generate(pb.GenerateRequest(), metadata=metadata, timeout=PATIENCE_S))


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def write_keys(path: Path, *keys: Key) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_text(as_yaml(list(keys)))
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


def key(name: str, secret: str, **fields: Any) -> Key:
    return Key(name=name, hash=hash_of(secret), **fields)


class TestKeys:
    def test_right_wrong_expired_and_missing(self, serve, tmp_path) -> None:
        past = datetime.now(UTC) - timedelta(seconds=2)
        keys = write_keys(
            tmp_path / "keys", key("a", "right"), key("b", "old", expires=past), key("c", "new", expires="2100-01-01")
        )
        front = serve(keys_file=str(keys))
        stub = front.stub()
        for secret in ("right", "new"):
            answer = front.get("/v1/x", authorization=f"Bearer {secret}")
            assert answer.status == 200
            assert answer.echoed["x-outrider-owner"] == hashlib.sha256(secret.encode()).hexdigest()
            assert secret not in str(answer.echoed), "the key goes no further"
            assert generate(stub, secret)[0] is grpc.StatusCode.OK
            assert front.service.metadata["x-outrider-owner"] == hashlib.sha256(secret.encode()).hexdigest()
        assert front.get("/v1/messages", x_api_key="right").status == 200, "as Anthropic's client sends it"
        for secret in ("wrong", "old", ""):
            answer = front.get("/v1/x", authorization=f"Bearer {secret}")
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert generate(stub, secret)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert front.get("/v1/x", authorization="Basic right").status == 401
        assert front.get("/v1/x").status == 401
        assert "authorization: Bearer KEY" in generate(stub)[1]

    def test_health_needs_none(self, serve, tmp_path) -> None:
        front = serve(keys_file=str(write_keys(tmp_path / "keys", key("a", "right"))))
        assert {front.get(path).status for path in ("/health", "/livez", "/readyz", "/-/healthz")} == {200}
        address = hashlib.sha256(f"127.0.0.1-{TOKEN}".encode()).hexdigest()
        assert front.get("/health", authorization="Bearer wrong").echoed["x-outrider-owner"] == address
        assert front.request("POST", "/health", b"").status == 401
        stub = health_pb2_grpc.HealthStub(front.channel())
        assert status_of(lambda: stub.Check(health_pb2.HealthCheckRequest()))[0] is grpc.StatusCode.OK
        next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)))

    def test_made_and_revoked_while_a_stream_runs(self, serve, tmp_path) -> None:
        keys = write_keys(tmp_path / "keys", key("a", "first"))
        front = serve(keys_file=str(keys))
        stub = front.stub()
        metadata = [("authorization", "Bearer first")]
        stream = stub.GenerateStream(pb.GenerateStreamRequest(), metadata=metadata, timeout=PATIENCE_S)
        next(stream)
        others = [key(f"k{number}", f"secret {number}") for number in range(999)]
        write_keys(keys, *others, key("b", "second"))
        until(lambda: generate(stub, "second")[0] is grpc.StatusCode.OK)
        assert generate(stub, "first")[0] is grpc.StatusCode.UNAUTHENTICATED
        assert front.get("/v1/x", authorization="Bearer secret 500").status == 200
        front.service.ends.set()
        list(stream)  # comes to its end
        assert stream.code() is grpc.StatusCode.OK

    def test_a_file_that_is_wrong_changes_nothing(self, serve, tmp_path) -> None:
        keys = write_keys(tmp_path / "keys", key("a", "first"))
        front = serve(keys_file=str(keys))
        keys.write_text("- name: [")
        with pytest.raises(ConfigError, match=r"serving\.gateway\.keys_file: .* is no valid YAML"):
            front.gateway.reload()
        assert generate(front.stub(), "first")[0] is grpc.StatusCode.OK

    def test_requests_a_minute(self, serve, tmp_path) -> None:
        keys = write_keys(tmp_path / "keys", key("a", "one"), key("b", "two", requests_per_minute=2))
        front = serve(keys_file=str(keys), requests_per_minute=4)
        stub = front.stub()
        codes = [generate(stub, "two")[0] for _ in range(3)]
        assert codes == [grpc.StatusCode.OK] * 2 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
        answer = front.get("/v1/x", authorization="Bearer two")
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded"), "both APIs count together"
        assert int(answer.headers["retry-after"]) > 0
        metadata = [("authorization", "Bearer two")]
        stub.GetServerStatus(pb.GetServerStatusRequest(), metadata=metadata, timeout=PATIENCE_S)
        assert [front.get("/v1/x", authorization="Bearer one").status for _ in range(5)] == [200] * 4 + [429]


def test_requests_a_minute_of_an_address(serve) -> None:
    front = serve(requests_per_minute=3)
    stub = front.stub()
    codes = [generate(stub)[0] for _ in range(4)]
    assert codes == [grpc.StatusCode.OK] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert front.get("/v1/x").status == 429
    assert front.get("/health").status == front.get("/v1/models").status == 200


class TestTls:
    @pytest.fixture
    def files(self, tmp_path) -> tuple[Authority, Path]:
        authority = Authority()
        authority.sign().write(tmp_path, "server")
        (tmp_path / "ca.pem").write_bytes(authority.certificate)
        return authority, tmp_path

    @staticmethod
    def config(folder: Path, **more: str) -> dict[str, str]:
        return {"certificate": str(folder / "server.pem"), "key": str(folder / "server.key"), **more}

    @staticmethod
    def context(authority: Authority) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=authority.certificate.decode())

    def test_plain_text_gets_nothing(self, serve, files) -> None:
        authority, folder = files
        front = serve(tls=self.config(folder))
        assert front.get("/v1/x", self.context(authority)).echoed["x-outrider-gateway"] == TOKEN
        assert generate(front.stub(grpc.ssl_channel_credentials(authority.certificate)))[0] is grpc.StatusCode.OK
        with pytest.raises((http.client.HTTPException, OSError)):
            front.get("/v1/x")
        assert generate(front.stub())[0] is grpc.StatusCode.UNAVAILABLE

    @pytest.mark.parametrize("file", ["certificate", "key", "client_ca"])
    @pytest.mark.parametrize("content", [None, b"no PEM\n"])
    def test_a_file_that_is_wrong_is_named(self, serve, files, file, content) -> None:
        _, folder = files
        wrong = folder / "wrong"
        if content is not None:
            wrong.write_bytes(content)
            wrong.chmod(0o600)
        field = "certificate" if file == "key" and content is not None else file  # HAProxy has them in one file
        with pytest.raises(ConfigError, match=rf"^serving\.gateway\.tls\.{field}: "):
            serve(tls=self.config(folder) | {file: str(wrong)})

    def test_a_key_of_another_certificate_is_refused_at_the_start_and_later(self, serve, files) -> None:
        authority, folder = files
        authority.sign().write(folder, "other")
        mismatched = self.config(folder) | {"key": str(folder / "other.key")}
        with pytest.raises(ConfigError, match=r"^serving\.gateway\.tls\.certificate: "):
            serve(tls=mismatched)
        front = serve(tls=self.config(folder))
        (folder / "other.key").replace(folder / "server.key")
        with pytest.raises(ConfigError, match=r"^serving\.gateway\.tls: HAProxy refuses server\.pem: "):
            front.gateway.reload()
        assert front.get("/v1/x", self.context(authority)).status == 200


def test_a_port_in_use_is_named(serve) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    config = GatewayConfig(http_port=0, grpc_port=port)
    with pytest.raises(
        ConfigError, match=rf"^serving\.gateway: .*Address already in use.* for \[127\.0\.0\.1:{port}\]"
    ):
        Gateway(config, TOKEN, ("127.0.0.1", 1), ("127.0.0.1", 1)).start()


def exchange(port: int, *parts: bytes) -> bytes:
    """What comes until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        for number, part in enumerate(parts):
            time.sleep(0.2 if number else 0)
            connection.sendall(part)
        try:
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            return b""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
DATA, HEADERS, END_STREAM, END_HEADERS = 0, 1, 1, 4


def headers(path: bytes, method: bytes = b"\x83", flags: int = END_HEADERS | END_STREAM) -> bytes:
    """A frame of HPACK literals; method is POST unless it is GET's ``\\x82``."""
    block = method + b"\x86\x04" + bytes([len(path)]) + path + b"\x01\x01x"
    for name, value in ((b"te", b"trailers"), (b"content-type", b"application/grpc")):
        block += b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
    return frame(HEADERS, flags, 1, block)


class TestBodies:
    @pytest.mark.parametrize("sent", [b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1", b""])
    def test_too_slow(self, serve, sent) -> None:
        assert b" 408 " in exchange(serve(header_timeout_s=0.3).gateway.config.http_port, sent)

    def test_a_message_that_does_not_come(self, serve) -> None:
        front = serve(header_timeout_s=0.3, idle_timeout_s=0.3)
        sent = PREFACE + headers(b"/outrider.v1.GenerationService/Generate", flags=END_HEADERS)
        assert b"did not arrive in time" in exchange(front.gateway.config.grpc_port, sent)
        assert not front.service.metadata


def test_a_client_that_leaves_ends_its_stream(serve) -> None:
    front = serve()
    stream = front.stub().GenerateStream(pb.GenerateStreamRequest(), timeout=PATIENCE_S)
    next(stream)
    stream.cancel()
    assert front.service.left.wait(PATIENCE_S)


def test_clients_that_wait_are_not_idle(serve) -> None:
    front = serve(idle_timeout_s=0.5, header_timeout_s=0.5)
    front.service.released.clear()
    stub = front.stub()
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(generate, stub), pool.submit(front.get, "/held")]
        assert front.service.arrived.acquire(timeout=PATIENCE_S)
        assert front.http_backend.arrived.acquire(timeout=PATIENCE_S)
        time.sleep(1.5)
        front.service.released.set()
        front.http_backend.released.set()
        assert calls[0].result()[0] is grpc.StatusCode.OK
        assert calls[1].result().status == 200


STEERING = {
    "x-outrider-owner": "a",
    "x-outrider-gateway": "a",
    "x-outrider-timeout": "1S",
    "x-outrider-else": "a",
    "serve_multiplexed_model_id": "a",
    "Serve-Multiplexed-Model-Id": "a",
    "x-session-id": "a",
    "x-serve-router-a": "a",
    "x-request-timeout-seconds": "0.001",
    "x-request-disconnect-disabled": "?1",
    "x-forwarded-for": "192.0.2.1",
    "forwarded": "for=192.0.2.1",
}


def test_what_only_the_gateway_may_say(serve) -> None:
    front = serve()
    connection = front.http()
    connection.request("GET", "/v1/x", headers={**STEERING, "x-request-id": "mine"})
    answer = connection.getresponse()
    echoed = {name.lower(): value for name, value in json.loads(answer.read())["headers"].items()}
    owner = hashlib.sha256(f"127.0.0.1-{TOKEN}".encode()).hexdigest()
    ours = {"x-outrider-gateway": TOKEN, "x-outrider-owner": owner, "x-forwarded-for": "127.0.0.1"}
    assert echoed.items() >= {**ours, "x-request-id": "mine"}.items()
    assert {name.lower() for name in STEERING} & echoed.keys() == ours.keys()
    metadata = [(name.lower(), value) for name, value in STEERING.items()]
    metadata += [("multiplexed_model_id", "a"), ("session_id", "a"), ("application", "other")]
    front.stub().Generate(pb.GenerateRequest(), metadata=metadata, timeout=50)
    got = front.service.metadata
    assert got.items() >= {**ours, "application": "other"}.items()
    assert {name.lower() for name, _ in metadata} & got.keys() == {*ours, "x-outrider-timeout", "application"}
    assert re.fullmatch(r"50S|(49|50)\d{3}m", got["x-outrider-timeout"]), "the deadline, as this gRPC rounds it"


def test_status_calls_take_no_place_of_generation(serve) -> None:
    front = serve()
    front.service.released.clear()
    stub = front.stub()
    calls = [stub.GetServerStatus.future(pb.GetServerStatusRequest(), timeout=PATIENCE_S) for _ in range(12)]
    for _ in range(8):
        assert front.service.arrived.acquire(timeout=PATIENCE_S)
    running = stub.Generate.future(pb.GenerateRequest(), timeout=PATIENCE_S)
    assert front.service.arrived.acquire(timeout=PATIENCE_S)
    assert front.service.metadata, "generation has come"
    until(lambda: sum(call.done() for call in calls) == 4)  # those that found no place within the queue's time
    front.service.released.set()
    assert running.exception(PATIENCE_S) is None
    codes = [call.code() for call in calls]
    assert (codes.count(grpc.StatusCode.OK), codes.count(grpc.StatusCode.UNAVAILABLE)) == (8, 4)
    assert any("busy" in call.details() for call in calls)


def test_rollouts_are_on_the_admin_port_alone(serve) -> None:
    """They change the model for everybody, so that without an admin port there are none."""
    without, front = serve(), serve(admin_port=0)
    for _, path in ROUTES:
        for each in (without, front):
            assert each.get(path).status == 404
            assert each.get(f"/%{ord(path[1]):x}{path[2:]}").status == 404
        assert "x-outrider-gateway" in front.get(path, port=front.gateway.config.admin_port).echoed


def test_errors_when_nothing_listens_behind(serve) -> None:
    front = serve()
    front.http_backend.shutdown()
    front.http_backend.server_close()
    answer = front.get("/v1/x")
    assert (answer.status, answer.error["type"]) == (503, "server_error")


def test_drain_lets_a_stream_end_and_takes_nothing_new(serve) -> None:
    front = serve()
    stream = front.stub().GenerateStream(pb.GenerateStreamRequest(), timeout=PATIENCE_S)
    next(stream)
    watch = health_pb2_grpc.HealthStub(front.channel()).Watch(health_pb2.HealthCheckRequest())
    next(watch)
    idle = front.http()
    idle.request("GET", "/v1/x")
    idle.getresponse().read()
    with ThreadPoolExecutor() as pool:
        drained = pool.submit(front.gateway.drain, PATIENCE_S)

        def refused() -> bool:
            try:
                front.get("/v1/x")
            except OSError:
                return True
            return False

        until(refused)
        for _ in range(3):
            next(stream)
        assert not drained.done()
        front.service.ends.set()
        list(stream)
        assert stream.code() is grpc.StatusCode.OK
        assert drained.result(), "idle connections and watches do not hold it up"


def test_haproxy_ends_with_its_parent() -> None:
    code = f"""
import time
from outrider.cluster.config import GatewayConfig
from outrider.deploy.gateway import Gateway
gateway = Gateway(GatewayConfig(http_port=0, grpc_port=0), {TOKEN!r}, ("127.0.0.1", 1), ("127.0.0.1", 1))
gateway.start()
print(gateway.config.http_port, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    socket.create_connection(("127.0.0.1", port)).close()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    def gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        return False

    until(gone)
