"""What is small where it is made and large where it is read: refused by name, before the memory is taken."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb

MOST_GROWTH_KIB = 64 << 10
MIB = 1 << 20


@dataclass
class Server:
    pid: int
    grpc_port: int
    http_url: str

    def memory_kib(self, of: str = "VmRSS") -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split(f"{of}:")[1].split()[0])

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    environment = {**os.environ, **LimitsConfig(refused_seconds_per_minute=0).to_environment()}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.security.door_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    grpc_port, http_port = process.stdout.readline().split()
    server = Server(process.pid, int(grpc_port), f"http://127.0.0.1:{http_port}")
    ask(server, pb.GenerateRequest(text="warm").SerializeToString())
    post(server, "/v1/completions", b'{"prompt": "warm"}')
    yield server
    process.communicate("", timeout=60)


@pytest.fixture
def bounded(server: Server) -> Iterator[Server]:
    before = server.memory_kib()
    server.forget_peak()
    yield server
    grown = server.memory_kib("VmHWM") - before
    assert grown <= MOST_GROWTH_KIB, f"{grown >> 10} MiB"
    assert ask(server, pb.GenerateRequest(text="still there").SerializeToString()) == "OK"


def ask(server: Server, data: bytes, compression: grpc.Compression = grpc.Compression.NoCompression) -> str:
    """How the call ended."""
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        call = channel.unary_unary("/outrider.v1.GenerationService/Generate")
        try:
            call(data, compression=compression, timeout=60)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def post(server: Server, path: str, body: bytes | Iterator[bytes]) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(server.http_url + path, content=body, headers={"content-type": "application/json"})


def test_a_message_that_grows_when_it_is_decompressed(bounded: Server) -> None:
    ended = ask(bounded, bytes(200 * MIB), grpc.Compression.Gzip)
    assert ended.startswith("RESOURCE_EXHAUSTED"), ended


def test_a_message_beyond_what_grpc_takes_in(bounded: Server) -> None:
    ended = ask(bounded, bytes(100 * MIB))
    assert ended.startswith("RESOURCE_EXHAUSTED"), ended


MANY_MESSAGES = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * (3 * MIB))).SerializeToString()
MANY_STOPS = pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(stop=["s"] * 2_000_000)).SerializeToString()
MANY_IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (7 * MIB))).SerializeToString()


@pytest.mark.parametrize("data", [MANY_MESSAGES, MANY_STOPS, MANY_IDS], ids=["messages", "stop strings", "token ids"])
def test_a_message_that_grows_when_it_is_decoded(bounded: Server, data: bytes) -> None:
    assert len(data) < 8 * MIB, "within the limit in bytes"
    ended = ask(bounded, data)
    assert ended.startswith("INVALID_ARGUMENT: request: holds too many values; send at most 262144"), ended


def test_a_message_that_is_too_long(bounded: Server) -> None:
    ended = ask(bounded, pb.GenerateRequest(text="x" * (9 * MIB)).SerializeToString())
    assert ended.startswith("INVALID_ARGUMENT: request: 9437189 bytes are too many; send at most 8388608"), ended


def test_a_body_that_says_how_long_it_is(bounded: Server) -> None:
    """Nothing of it need come."""
    port = int(bounded.http_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 1073741824\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"limits.max_request_bytes" in answer


def test_who_sends_somewhat_too_much_reads_why(bounded: Server) -> None:
    assert post(bounded, "/v1/completions", b" " * (9 * MIB)).status_code == 413


def test_a_body_that_does_not_say(bounded: Server) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += MIB
            yield b" " * MIB

    try:
        assert post(bounded, "/v1/completions", body()).status_code == 413
    except httpx.TransportError:  # hung up on while sending: the answer is lost with it
        assert sent < 100 * MIB


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * (2 * MIB) + b"[]]}",
        b'{"prompt": [' + b'{"a":1},' * (900_000) + b"{}]}",
        b'{"prompt": [' + b"1," * (3 * MIB) + b"1]}",
        b"[" * (7 * MIB),
    ],
    ids=["lists", "objects", "numbers", "nested"],
)
def test_a_body_that_grows_when_it_is_decoded(bounded: Server, body: bytes) -> None:
    answer = post(bounded, "/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: holds too many values; send at most 262144")


@pytest.mark.parametrize("text", ['a, {b} [c] \\"d\\", ' * 110_000, ",\n" * 1_000_000], ids=["quotes", "escapes"])
def test_commas_in_a_text_are_no_values(bounded: Server, text: str) -> None:
    assert post(bounded, "/v1/completions", json.dumps({"prompt": text}).encode()).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "stop_token_ids", ["no id"] * 25_000),
        ("/v1/completions", "stop", ["s"] * 25_000),
        ("/v1/completions", "stop", "s" * (6 * MIB)),
        ("/v1/completions", "bad_words", ["b" * (6 * MIB)]),
        ("/v1/completions", "bad_words", ["b"] * 25_000),
        ("/v1/responses", "stop_token_ids", ["no id"] * 25_000),
        ("/v1/chat/completions", "logit_bias", {str(number): 1 for number in range(25_000)}),
        ("/detokenize", "tokens", [1] * 200_000),
    ],
)
def test_a_list_that_is_too_long_is_refused_by_name(bounded: Server, path: str, field: str, value: object) -> None:
    answer = post(bounded, path, json.dumps({"prompt": "x", field: value}).encode())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert "send at most" in error["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ["s"] * 17},
        {"stop": ["s" * 1025]},
        {"bad_words": ["b"] * 257},
        {"bad_words": ["b" * 257]},
        {"stop_token_ids": [1] * 1025},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_likewise_over_grpc(server: Server, sampling: dict[str, object]) -> None:
    ended = ask(server, pb.GenerateRequest(text="x", sampling=pb.SamplingParameters(**sampling)).SerializeToString())
    (field,) = sampling
    assert ended.startswith(f"INVALID_ARGUMENT: sampling.{field}: "), ended
    assert "send at most" in ended
