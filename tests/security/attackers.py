"""Makes bytes that attackers send, and callers of either API at their own address."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import httpx

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.support.cluster.serving import wait_until

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""Source addresses: the legitimate caller's and the attacker's, or the other way round."""

GUARD_S = 180.0
"""Seconds to wait for what has no deadline of its own. Nothing is measured against it."""

PROMPT = list(b"the quick brown fox jumps")
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GENERATE, STREAM = (f"/outrider.v1.GenerationService/{name}".encode() for name in ("Generate", "GenerateStream"))
END_STREAM, END_HEADERS = 1, 4
_DATA, _HEADERS, _SETTINGS = 0, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0)


def data(payload: bytes, flags: int = 0, stream: int = 1) -> bytes:
    parts = [payload[start : start + 16384] for start in range(0, len(payload), 16384)] or [b""]
    ends = [0] * (len(parts) - 1) + [flags]
    return b"".join(frame(_DATA, end, stream, part) for end, part in zip(ends, parts, strict=True))


def request(path: bytes, *fields: tuple[bytes, bytes], method: str = "POST", stream: int = 1, flags: int = 4) -> bytes:
    """HTTP/2 HEADERS: literals without an index. A name or value has at most 126 bytes."""
    block = (b"\x83" if method == "POST" else b"\x82") + b"\x86\x04" + _text(path) + b"\x01" + _text(b"x")
    block += b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(_HEADERS, flags, stream, block)


def call(path: bytes, *fields: tuple[bytes, bytes], stream: int = 1) -> bytes:
    """The headers of a gRPC call."""
    return request(path, (b"content-type", b"application/grpc"), (b"te", b"trailers"), *fields, stream=stream)


def message(content: bytes, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


def _text(text: bytes) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text


def connect(port: int, source: str = HERE, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(GUARD_S)
    made.bind((source, 0))
    made.connect((HERE, port))
    return made


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes."""
    with suppress(ConnectionError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def exchange(port: int, sent: bytes, source: str = HERE, until: bytes | None = None) -> bytes:
    """Everything that comes until the other side closes, or until this has come."""
    with connect(port, source) as connection, suppress(ConnectionError):
        connection.sendall(sent)
        if until is None:
            return read_all(connection)
        got = b""
        while until not in got and (part := connection.recv(65536)):
            got += part
        return got
    return b""


class Drip:
    """Connections that send their opening at once and then a byte each now and then, until the server closes them.

    It reads nothing but the end, when there is one.
    """

    def __init__(self, port: int, opening: bytes, byte: bytes, number: int, source: str = ELSEWHERE) -> None:
        self._byte = byte
        self.left = [connect(port, source) for _ in range(number)]
        for connection in self.left:
            connection.sendall(opening)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.left and not self._stop.wait(0.1):
            readable, _, _ = select.select(self.left, [], [], 0)
            for connection in list(self.left):
                try:
                    if connection in readable and not connection.recv(65536):
                        raise ConnectionError
                    connection.sendall(self._byte)
                except OSError:
                    connection.close()
                    self.left.remove(connection)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self.left:
            connection.close()


class Relay:
    """Carries connections to a port from another source address: gRPC's clients cannot choose theirs."""

    def __init__(self, port: int, source: str) -> None:
        self._to, self._source = port, source
        self._listener = socket.create_server((HERE, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = connect(self._to, self._source)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    @staticmethod
    def _carry(here: socket.socket, there: socket.socket) -> None:
        here.settimeout(None)
        with suppress(OSError):
            while part := here.recv(65536):
                there.sendall(part)
        for each in (here, there):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Caller:
    """A caller of both APIs at one source address, with an API key or without."""

    def __init__(
        self,
        http_port: int,
        grpc_port: int,
        source: str = HERE,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._relay = None if source == HERE else Relay(grpc_port, source)
        address = f"localhost:{grpc_port if self._relay is None else self._relay.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        self.channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        self.stub = rpc.GenerationServiceStub(self.channel)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.metadata = tuple(headers.items())
        self.http = httpx.Client(
            base_url=f"http{'s' if tls else ''}://{HERE}:{http_port}",
            headers=headers,
            transport=httpx.HTTPTransport(local_address=source, verify=tls if tls is not None else True),
            timeout=GUARD_S,
        )

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.channel.close()
        if self._relay is not None:
            self._relay.close()

    def generate(self, timeout_s: float = GUARD_S, **fields: Any) -> pb.GenerateResponse:
        return self.stub.Generate(generation(pb.GenerateRequest, **fields), timeout=timeout_s, metadata=self.metadata)

    def stream(self, timeout_s: float = GUARD_S, **fields: Any) -> Any:
        asked = generation(pb.GenerateStreamRequest, **fields)
        return self.stub.GenerateStream(asked, timeout=timeout_s, metadata=self.metadata)

    def code(self, **fields: Any) -> str:
        return code_of(lambda: self.generate(**fields))

    def complete(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        whole = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, **fields}
        return self.http.post(path, json=whole)

    def tokens(self, max_tokens: int = 24) -> list[list[int]]:
        """The same answer by either API."""
        over_grpc = self.generate(max_tokens=max_tokens)
        answer = self.complete(max_tokens=max_tokens)
        assert answer.status_code == 200, answer.text
        return [list(over_grpc.token_ids), answer.json()["choices"][0]["token_ids"]]


def generation(
    kind: Any,
    prompt: Sequence[int] = PROMPT,
    request_id: str | None = None,
    cache_salt: str | None = None,
    **sampling: Any,
) -> Any:
    parameters = pb.SamplingParameters(**{"temperature": 0.0, **sampling})
    return kind(token_ids=pb.TokenIds(ids=prompt), request_id=request_id, cache_salt=cache_salt, sampling=parameters)


def code_of(ask: Any) -> str:
    """The name of the status with which a gRPC call ends."""
    try:
        ask()
    except grpc.RpcError as error:
        name: str = error.code().name  # type: ignore[attr-defined]
        return name
    return "OK"


@contextmanager
def held(connections: Iterable[socket.socket]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in connections]


def wait_for(holds: Any, what: str) -> None:
    """Wait for what has no deadline of its own. Fails with what was waited for."""
    wait_until(holds, GUARD_S, what)
