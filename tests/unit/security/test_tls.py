"""TLS on real gRPC and asyncio servers: who gets in, what a stranger sees, and certificates that change meanwhile."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from outrider.actors.serve_seam.listening import bind_grpc
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.tls import Certificates, load_certificates, rotate
from outrider.cluster.config import ConfigError, parse_config
from tests.certificates import Authority, Signed

OURS, FOREIGN = Authority("ours"), Authority("foreign")
LONG_S = 60


@dataclass
class Files:
    directory: Path
    certificate: Path
    key: Path
    client_ca: Path | None

    def reloading(self) -> Reloading[Certificates]:
        paths = [str(path) if path else None for path in (self.certificate, self.key, self.client_ca)]
        watched = [path for path in paths if path]
        return Reloading(watched, lambda: load_certificates(*paths), look_every_s=0)


def files(directory: Path, *, clients: bool = False) -> Files:
    certificate, key = OURS.sign("first").write(directory, "server")
    if clients:
        (directory / "clients.pem").write_bytes(OURS.certificate)
    return Files(directory, certificate, key, directory / "clients.pem" if clients else None)


class Ports:
    """One server of each kind on the same files. `grpc` and `http` connect anew and say what came of it: the server's
    certificate's name, or None for a refusal."""

    def __init__(self, grpc_port: int, http_port: int) -> None:
        self.grpc_port, self.http_port = grpc_port, http_port

    async def grpc(self, client: Signed | None = None, roots: bytes = OURS.certificate) -> bytes | None:
        shown = (client.private_key, client.certificate) if client else (None, None)
        credentials = grpc.ssl_channel_credentials(roots, *shown)
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"localhost:{self.grpc_port}", credentials, options=options) as channel:
            try:
                return await channel.unary_unary("/test.Test/Ask")(b"", timeout=LONG_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return None

    async def http(
        self, directory: Path, client: Signed | None = None, roots: bytes = OURS.certificate, host: str = "localhost"
    ) -> str | None:
        context = ssl.create_default_context(cadata=roots.decode())
        if client is not None:
            context.load_cert_chain(*client.write(directory, "client"))
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.http_port, ssl=context, server_hostname=host
            )
            name = writer.get_extra_info("peercert")["subject"][0][0][1]
            writer.write(b"hello\n")
            answer = await reader.readline()  # in TLS 1.3 the refusal of a client comes with the first thing read
            writer.close()
        except OSError:
            return None
        return name if answer == b"hello\n" else None


@asynccontextmanager
async def serving(of: Files) -> AsyncIterator[Ports]:
    certificates = of.reloading()
    server = grpc.aio.server()

    async def ask(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"hello"

    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(ask)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    grpc_port = bind_grpc(server, "127.0.0.1", 0, certificates)
    await server.start()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(of.certificate, of.key)
    rotate(context, certificates)
    http = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    try:
        yield Ports(grpc_port, http.sockets[0].getsockname()[1])
    finally:
        await server.stop(0)
        http.close()


async def test_the_ports_speak_tls_and_show_the_certificate(tmp_path):
    async with serving(files(tmp_path)) as ports:
        assert await ports.grpc() == b"hello"
        assert await ports.http(tmp_path) == "first"
        assert await ports.http(tmp_path, host="127.0.0.1") == "first"
        assert await ports.grpc(roots=FOREIGN.certificate) is None
        assert await ports.http(tmp_path, roots=FOREIGN.certificate) is None


async def test_plain_text_gets_no_answer(tmp_path):
    async with serving(files(tmp_path)) as ports:
        async with grpc.aio.insecure_channel(f"localhost:{ports.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/test.Test/Ask")(b"", timeout=LONG_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        reader, writer = await asyncio.open_connection("127.0.0.1", ports.http_port)
        writer.write(b"hello\n")
        assert b"hello" not in await reader.read(100)
        writer.close()


async def test_a_client_needs_a_certificate_of_the_right_authority(tmp_path):
    async with serving(files(tmp_path, clients=True)) as ports:
        friend, stranger, late = OURS.sign("friend"), FOREIGN.sign("friend"), OURS.sign("x", timedelta(seconds=-5))
        assert (await ports.grpc(friend), await ports.http(tmp_path, friend)) == (b"hello", "first")
        for client in (None, stranger, late):
            assert (await ports.grpc(client), await ports.http(tmp_path, client)) == (None, None)


async def test_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path):
    of = files(tmp_path)
    async with serving(of) as ports:
        context = ssl.create_default_context(cadata=OURS.certificate.decode())
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", ports.http_port, ssl=context, server_hostname="localhost"
        )
        credentials = grpc.ssl_channel_credentials(OURS.certificate)
        async with grpc.aio.secure_channel(f"localhost:{ports.grpc_port}", credentials) as before:
            ask = before.unary_unary("/test.Test/Ask")
            assert await ask(b"", timeout=LONG_S) == b"hello"
            FOREIGN.sign("second").write(tmp_path, "server")
            assert await ports.http(tmp_path, roots=FOREIGN.certificate) == "second"
            assert await ports.grpc(roots=FOREIGN.certificate) == b"hello"
            assert await ports.grpc() is None, "who believes the old authority alone sees a stranger"
            assert await ask(b"", timeout=LONG_S) == b"hello"
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()


async def test_the_authorities_of_clients_change_too(tmp_path):
    of = files(tmp_path, clients=True)
    async with serving(of) as ports:
        old, new = OURS.sign("client"), FOREIGN.sign("client")
        (tmp_path / "clients.pem").write_bytes(FOREIGN.certificate)
        assert (await ports.grpc(new), await ports.http(tmp_path, new)) == (b"hello", "first")
        assert (await ports.grpc(old), await ports.http(tmp_path, old)) == (None, None)


async def test_no_call_is_lost_while_the_certificate_changes_again_and_again(tmp_path):
    of = files(tmp_path)
    async with serving(of) as ports:
        done = asyncio.Event()

        async def call_on() -> int:
            answered = 0
            while not done.is_set():
                assert await ports.grpc() == b"hello"
                assert await ports.http(tmp_path) is not None
                answered += 1
            return answered

        calling = [asyncio.create_task(call_on()) for _ in range(3)]
        for number in range(8):
            OURS.sign(f"number {number}").write(tmp_path, "server")
            await asyncio.sleep(0.05)
            assert await ports.http(tmp_path) == f"number {number}"
        done.set()
        assert min(await asyncio.gather(*calling)) > 0


async def test_files_that_cannot_be_used_leave_the_old_certificate_in_use(tmp_path):
    of = files(tmp_path)
    certificates = of.reloading()
    for number, spoil in enumerate(
        (
            lambda: of.certificate.write_bytes(OURS.sign("other").certificate),
            lambda: OURS.sign("late", timedelta(seconds=-5)).write(tmp_path, "server"),
            lambda: of.key.chmod(0o644),
            lambda: of.key.unlink(),
        ),
        1,
    ):
        spoil()
        assert certificates.current().expires > datetime.now(UTC)
        assert certificates.failures == number
        assert certificates.problem is not None
    OURS.sign("mended").write(tmp_path, "server")
    certificates.current()
    assert certificates.problem is None


def test_what_cannot_be_used_is_refused_by_field_with_the_fix(tmp_path):
    of = files(tmp_path, clients=True)
    certificate, key, ca = str(of.certificate), str(of.key), str(of.client_ca)
    assert load_certificates(certificate, key, ca).client_ca
    foreign = FOREIGN.sign("other").write(tmp_path, "foreign")
    expired = OURS.sign("late", timedelta(seconds=-5)).write(tmp_path, "expired")
    text = tmp_path / "text"
    text.write_text("no certificate")
    text.chmod(0o600)
    for arguments, told in (
        ((str(tmp_path / "none"), key), "serving.ssl_certfile: .*no such file; name one"),
        ((certificate, str(tmp_path / "none")), "serving.ssl_keyfile: .*no such file"),
        ((str(text), key), "serving.ssl_certfile: .*holds no certificate in PEM; give one"),
        ((certificate, str(text)), "serving.ssl_keyfile: .*is no private key in PEM"),
        (
            (certificate, str(foreign[1])),
            "serving.ssl_keyfile: .*does not belong to the certificate in .*made together",
        ),
        (tuple(map(str, expired)), "serving.ssl_certfile: .*expired at .*; renew it"),
        ((certificate, key, str(text)), "serving.ssl_ca_certs: .*holds no certificate"),
        ((certificate, key, str(expired[0])), "serving.ssl_ca_certs: .*expired"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_certificates(*arguments)
    early = lambda: datetime.now(UTC) - timedelta(days=9)  # noqa: E731
    with pytest.raises(ConfigError, match=r"serving.ssl_certfile: .*is valid from .* only"):
        load_certificates(certificate, key, now=early)
    for mode in (0o644, 0o620, 0o604):
        of.key.chmod(mode)
        with pytest.raises(ConfigError, match=f"serving.ssl_keyfile: .*mode {mode:04o}.*chmod 600"):
            load_certificates(certificate, key)


@pytest.mark.parametrize(
    ("serving_section", "told"),
    [
        ({"ssl_certfile": "c"}, "serving.ssl_keyfile: is missing beside ssl_certfile"),
        ({"ssl_keyfile": "k"}, "serving.ssl_certfile: is missing beside ssl_keyfile"),
        ({"ssl_ca_certs": "a"}, "serving.ssl_ca_certs: needs ssl_certfile and ssl_keyfile"),
        ({"tenant_isolation": True}, "serving.tenant_isolation: needs keys_file"),
        ({"keys_file": ""}, "serving.keys_file"),
    ],
)
def test_settings_that_belong_together_are_given_together(serving_section, told):
    with pytest.raises(ConfigError, match=told):
        parse_config({"target": {"model": "m"}, "serving": serving_section})
