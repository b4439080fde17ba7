"""What one key may hold of what all share: thresholds, the proxies' gate, the ingress' admission."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request

from outrider.actors.replica_calls import GenerationRequest
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.actors.serving.admission import Admission, KeyShareTaken
from outrider.actors.serving.gate import CAPACITY_METADATA, Gate, Gates
from outrider.actors.serving.grpc import door
from outrider.actors.serving.shares import SHARE_OF_FREE, Shares
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.unit.proxy_servers import proxy_servers
from tests.unit.scripted_proxy import Proxy

NAMES = ("flood", "friend")


def filled(most: int, keys: list[str]) -> dict[str, int]:
    """What each holds when all take one at a time, in turns, until none may."""
    shares, held = Shares(), dict.fromkeys(keys, 0)
    while True:
        free = most - sum(held.values())
        takers = [key for key in keys if free > 0 and shares.allow(key, 1, free)]
        if not takers:
            return held
        key = min(takers, key=lambda key: held[key])
        shares.take(key, 1)
        held[key] += 1


@pytest.mark.parametrize(("num_keys", "each"), [(1, 284), (2, 150), (10, 31)])
def test_keys_that_want_all_get_the_same_and_leave_room(num_keys: int, each: int) -> None:
    held = filled(320, [f"k{number}" for number in range(num_keys)])
    assert all(each <= number <= each + 1 for number in held.values())
    assert sum(held.values()) < 320


@given(st.integers(2, 2000), st.lists(st.integers(0, 5), max_size=300))
def test_a_key_that_comes_is_let_in_whatever_fewer_than_the_share_have_taken(most: int, asked: list[int]) -> None:
    shares, free = Shares(), most
    for number in asked:
        if free > 0 and shares.allow(f"k{number}", 1, free):
            shares.take(f"k{number}", 1)
            free -= 1
    if most > (SHARE_OF_FREE + 1) * 6:
        assert free > 0
    assert not free or shares.allow("another", 1, free)


def test_what_was_given_back_may_be_taken_again() -> None:
    shares = Shares()
    shares.take("a", 8)
    assert shares.allow("a", 8, 2)
    assert not shares.allow("a", 9, 2)
    shares.give_back("a", 8)
    assert shares.allow("a", 900, 1), "it holds nothing"
    shares.take(None, 1000)
    assert shares.allow(None, 1000, 1), "calls without a key have no threshold"


def test_a_gate_leaves_room_for_another_key() -> None:
    gate = Gate("calls")
    gate.learn("320")
    assert sum(gate.enter("flood") for _ in range(1000)) == 285
    assert not gate.is_full
    assert gate.enter("friend")
    assert not gate.enter("flood")
    for _ in range(10):
        gate.leave("flood")
    assert gate.enter("flood")
    assert sum(gate.enter() for _ in range(1000)) == 320 - 277
    assert gate.is_full
    assert not gate.enter("friend")


def test_a_gate_forgets_what_a_key_held_once_it_has_left() -> None:
    gate = Gate("calls")
    gate.learn("320")
    for _ in range(2):
        assert sum(gate.enter("flood") for _ in range(1000)) == 285
        for _ in range(285):
            gate.leave("flood")


def held_at_once(admission: Admission, held: ExitStack, key: str, **sampling: int) -> int:
    for number in range(10_000):
        try:
            held.enter_context(admission.hold(GenerationRequest("r", "x", sampling=sampling), key))
        except (KeyShareTaken, BackPressureError):
            return number
    raise AssertionError("there is no limit")


@pytest.mark.parametrize(
    ("limits", "sampling", "most"),
    [
        (LimitsConfig(max_sequences=320), {"n": 8, "max_tokens": 1}, 36),
        (LimitsConfig(max_tokens_in_flight=10_001), {"max_tokens": 100}, 89),
    ],
)
def test_the_ingress_leaves_room_for_another_key(limits: LimitsConfig, sampling: dict[str, int], most: int) -> None:
    admission = Admission(limits)
    with ExitStack() as held:
        assert held_at_once(admission, held, "flood", **sampling) == most
        assert held_at_once(admission, held, "friend", **sampling) > 0
    assert (admission.sequences, admission.tokens) == (0, 0)
    with ExitStack() as held:
        assert held_at_once(admission, held, "flood", **sampling) == most, "what ended is forgotten"


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    secrets = {name: new_secret() for name in NAMES}
    entries = (Key(name=name, hash=hash_of(s.encode()), scopes=("generate",)) for name, s in secrets.items())
    path = tmp_path / "keys.yaml"
    path.write_text("".join(map(as_entry, entries)))
    path.chmod(0o600)
    return secrets


WORDS = "the queue has no room for more requests of this key; retry when one of them has ended"


async def test_a_proxy_tells_keys_apart(secrets: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    """Over gRPC, through both guards: what one key may not have is refused in its own words, another's is answered."""
    monkeypatch.setattr(door, "_GATES", Gates("grpc"))
    proxy = Proxy()
    proxy.told = [(CAPACITY_METADATA, "40")]
    async with (
        proxy_servers(monkeypatch, proxy=proxy, keys_file=str(tmp_path / "keys.yaml")) as (serving, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        stub = rpc.GenerationServiceStub(channel)
        shown = {name: (("authorization", f"Bearer {secret}"),) for name, secret in secrets.items()}
        await stub.Generate(pb.GenerateRequest(), metadata=shown["friend"])
        wait = pb.GenerateStreamRequest(request_id="hang")
        held = [stub.GenerateStream(wait, metadata=shown["flood"]) for _ in range(40)]
        firsts = await asyncio.gather(*(call.read() for call in held), return_exceptions=True)
        over = [first for first in firsts if isinstance(first, grpc.aio.AioRpcError)]
        assert len(over) == 4
        assert {(error.code(), error.details()) for error in over} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, WORDS)}
        await stub.Generate(pb.GenerateRequest(), metadata=shown["friend"])
        for call in held:
            call.cancel()


async def test_a_proxy_tells_keys_apart_over_http(secrets: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    leave = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = await Request(scope, receive).json()
        headers = [(CAPACITY_METADATA.encode(), b"40")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if asked.get("hang"):
            await leave.wait()
        await send({"type": "http.response.body", "body": b"{}"})

    monkeypatch.setattr("tests.unit.proxy_servers._hello", app)
    async with (
        proxy_servers(monkeypatch, keys_file=str(tmp_path / "keys.yaml")) as (serving, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{serving.http_port}", timeout=60) as client,
    ):

        async def post(name: str, **body: bool) -> httpx.Response:
            headers = {"authorization": f"Bearer {secrets[name]}"}
            return await client.post("/v1/completions", json=body, headers=headers)

        assert (await post("friend")).status_code == 200
        held = [asyncio.create_task(post("flood", hang=True)) for _ in range(40)]
        over = [await answer for answer in itertools.islice(asyncio.as_completed(held), 4)]
        assert [response.status_code for response in over] == [429] * 4
        assert {response.json()["error"]["message"] for response in over} == {WORDS}
        assert (await post("friend")).status_code == 200
        leave.set()
        assert sorted(response.status_code for response in await asyncio.gather(*held)) == [200] * 36 + [429] * 4
