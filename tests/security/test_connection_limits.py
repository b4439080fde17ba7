"""Connections to Serve's real proxies: those beyond the limit are hung up on, and everybody else is served on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import httpx
import pytest
from ray.serve.generated import serve_pb2

from outrider.cluster.limits import LimitsConfig
from outrider.deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.security.served import Server, served
from tests.serving import HANG_GUARD_S, wait_until

pytestmark = pytest.mark.timeout(600)

MOST, SHARE = 24, 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Nobody is hung up on for being silent here.
    limits = LimitsConfig(max_connections=MOST, max_connections_per_peer=SHARE, receive_timeout_s=3600)
    with served(tmp_path_factory.mktemp("served"), limits) as server:
        yield server


def connect(port: int, source: str) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=HANG_GUARD_S, source_address=(source, 0))
    opened.settimeout(HANG_GUARD_S)
    return opened


def is_open(connection: socket.socket) -> bool:
    """Whether nobody has hung up on it, whatever was said before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_one_address_has_its_share_and_another_is_served_beside_it(server: Server, api: str) -> None:
    port = server.serving.grpc_port if api == "grpc" else server.serving.http_port
    with ExitStack() as stack:
        stranger = [stack.enter_context(connect(port, "127.0.0.2")) for _ in range(3 * SHARE // 2)]
        wait_until(lambda: sum(map(is_open, stranger)) <= SHARE, HANG_GUARD_S, "the newest are hung up on")
        assert sum(map(is_open, stranger)) == SHARE
        with OutriderClient(server.grpc_address) as client:
            assert client.generate("hello").text == "one three"
        assert httpx.get(f"{server.url}/health", timeout=HANG_GUARD_S).status_code == 200

    def is_let_in() -> bool:
        with connect(port, "127.0.0.2") as connection:
            try:
                connection.settimeout(2.0)
                return connection.recv(1) not in (b"", b"H")  # gRPC's server speaks first, HTTP's to refuse
            except TimeoutError:
                return True
            except ConnectionResetError:
                return False

    wait_until(is_let_in, HANG_GUARD_S, "their places are free again")


def test_what_nobody_serves_is_refused_by_the_real_proxies_and_what_serve_answers_itself_is_answered(
    server: Server,
) -> None:
    with grpc.insecure_channel(server.grpc_address, [("grpc.enable_http_proxy", 0)]) as channel:
        applications = channel.unary_unary("/ray.serve.RayServeAPIService/ListApplications")
        named = serve_pb2.ListApplicationsResponse.FromString(applications(b"", timeout=HANG_GUARD_S))
        assert list(named.application_names) == ["outrider"]
        generate = rpc.GenerationServiceStub(channel).Generate
        for name in ("outrider", "made up"):  # there is one, which Serve takes whatever it is called
            metadata = (("application", name),)
            assert generate(pb.GenerateRequest(text="hello"), metadata=metadata, timeout=HANG_GUARD_S).text
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError, match="bytes are too many for a grpc"):
            check(bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=HANG_GUARD_S)

    def answer(data: bytes) -> bytes:
        with connect(server.serving.http_port, "127.0.0.1") as connection:
            connection.sendall(data)
            return connection.recv(1 << 16)

    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n"
    assert answer(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n").startswith(b"HTTP/1.1 400")
    assert answer(b"GET / HTTP/1.1\r\nx: " + b"x" * (32 << 10)).startswith(b"HTTP/1.1 431")
    half = b"POST /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{"
    assert answer(half).startswith(b"HTTP/1.1 200"), "a probe's body is not waited for"
