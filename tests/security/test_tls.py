"""TLS through Serve's proxies: the ports themselves speak it, ask for a certificate, and take a new one under load."""

from __future__ import annotations

import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.probe import Probe
from tests.certificates import Authority, Signed
from tests.security.served import Server, served
from tests.serving import wait_until

pytestmark = pytest.mark.timeout(300)

OURS, FOREIGN = Authority("ours"), Authority("foreign")
FRIEND, STRANGER = OURS.sign("friend"), FOREIGN.sign("friend")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    certificate, key = OURS.sign("first").write(directory, "server")
    (directory / "clients.pem").write_bytes(OURS.certificate)
    with served(
        directory,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_ca_certs=str(directory / "clients.pem"),
        reflection=False,
    ) as server:
        yield server


def client(server: Server, shown: Signed | None) -> OutriderClient:
    pair = (shown.private_key, shown.certificate) if shown else (None, None)
    return OutriderClient(server.grpc_address, credentials=grpc.ssl_channel_credentials(OURS.certificate, *pair))


def get(server: Server, directory: Path, shown: Signed | None, path: str = "/health") -> int | None:
    """The status; None: no connection."""
    context = ssl.create_default_context(cadata=OURS.certificate.decode())
    if shown is not None:
        context.load_cert_chain(*shown.write(directory, "client"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(server.url + path, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def served_name(server: Server, port: int, directory: Path) -> str:
    context = ssl.create_default_context(cadata=OURS.certificate.decode())
    context.load_cert_chain(*FRIEND.write(directory, "friend"))
    context.set_alpn_protocols(["h2"] if port == server.serving.grpc_port else [])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert()["subject"][0][0][1]


def test_a_friend_comes_in_by_both_ports(server, directory):
    with client(server, FRIEND) as friend:
        assert friend.generate("hello").text == "one three"
    assert get(server, directory, FRIEND) == 200


@pytest.mark.parametrize("shown", [None, STRANGER], ids=["no certificate", "another authority's"])
def test_strangers_do_not(server, directory, shown):
    with client(server, shown) as stranger, pytest.raises(OutriderError) as refused:
        stranger.generate("hello", timeout_s=30)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert get(server, directory, shown) is None


def test_plain_text_is_not_understood_on_either_port(server):
    with OutriderClient(server.grpc_address) as plain, pytest.raises(OutriderError) as refused:
        plain.generate("hello", timeout_s=30)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", server.serving.http_port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1" not in connection.recv(100)


def test_reflection_can_be_switched_off(server):
    pair = FRIEND.private_key, FRIEND.certificate
    with grpc.secure_channel(server.grpc_address, grpc.ssl_channel_credentials(OURS.certificate, *pair)) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([b""]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_start_up_probe_tells_when_the_ports_are_not_what_was_configured(server):
    assert Probe(server.serving).missing() is None
    Probe(server.serving).check()
    plain = socket.create_server(("127.0.0.1", 0))
    answering = threading.Thread(target=_answer_once, args=(plain,), daemon=True)
    answering.start()
    port = plain.getsockname()[1]
    wrong = server.serving.model_copy(update={"grpc_port": port})
    with pytest.raises(ConfigError, match=rf"serving.ssl_certfile: port {port} answers plain text"):
        Probe(wrong).check()
    plain.close()
    everywhere = socket.create_server(("0.0.0.0", 0))
    wrong = server.serving.model_copy(update={"http_port": everywhere.getsockname()[1]})
    answering = threading.Thread(target=_hang_up, args=(everywhere,), daemon=True)
    answering.start()
    with pytest.raises(ConfigError, match=r"serving.host: is 127.0.0.1, but serving.http_port .* every interface"):
        Probe(wrong).check()
    everywhere.close()


def _answer_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


def _hang_up(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def test_certificates_change_under_load_and_no_call_is_lost(server, directory):
    lost: list[BaseException] = []
    answered = [0, 0]
    over = threading.Event()

    def call(number: int, once) -> None:
        while not over.is_set():
            try:
                once()
            except BaseException as error:  # noqa: BLE001 - told by the main thread
                lost.append(error)
                return
            answered[number] += 1

    def by_grpc() -> None:
        with client(server, FRIEND) as anew:  # a connection of its own each time
            assert anew.generate("hello").text == "one three"

    def by_http() -> None:
        assert get(server, directory, FRIEND, "/outrider/page/page.js") == 200

    with client(server, FRIEND) as kept, kept.stream("hang", request_id="kept") as stream:
        next(stream)
        threads = [threading.Thread(target=call, args=each) for each in enumerate((by_grpc, by_http))]
        for thread in threads:
            thread.start()
        try:
            for number in range(3):
                seen = list(answered)
                OURS.sign(f"number {number}").write(directory, "server")
                for port in (server.serving.grpc_port, server.serving.http_port):
                    wait_until(
                        lambda p=port, n=number: served_name(server, p, directory) == f"number {n}", 60, "the new one"
                    )
                wait_until(
                    lambda s=seen: lost or all(now > then for now, then in zip(answered, s, strict=True)), 60, "calls"
                )
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert lost == []
        assert kept.abort("kept")
