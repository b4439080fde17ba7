"""The ingress with keys: whose request is whose, over whichever ingress it is asked, and who is told nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.serve.grpc_util import RayServegRPCContext

from outrider.actors.observability.metrics import IngressMetrics
from outrider.actors.replica_calls import RequestError, RoundOutput, Usage
from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serving.access import process
from outrider.actors.serving.access.keys import Key, as_entry, hash_of, new_secret
from outrider.actors.serving.access.process import guard_ingress
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.failures import REQUEST_ID_METADATA
from outrider.actors.serving.grpc import servicer
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.cluster.limits import LimitsConfig
from outrider.v1 import generation_pb2 as pb
from tests.unit.serving.grpc.test_abort_everywhere import EmptyTarget, Replicas

SCOPES = {"alice": ("generate",), "bob": ("generate",), "root": ("admin",), "watcher": ("status",)}
SECRETS = {name: new_secret() for name in SCOPES}


class Connection:
    """What a RayServegRPCContext copies of a call from a proxy."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [] if self._name is None else [("authorization", f"Bearer {SECRETS.get(self._name, self._name)}")]

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def code(self) -> None: ...

    def details(self) -> None: ...

    def peer_identities(self) -> None: ...

    def peer_identity_key(self) -> None: ...

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return []


class Target(Replicas):
    """Answers with one token, then waits; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(EmptyTarget())
        self.asked: list[Any] = []
        self.generate = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._generate))

        self.revert_drafter = SimpleNamespace(remote=self._revert)

    def _generate(self, request: Any) -> Any:
        self.asked.append(request)
        return Stream()

    async def _revert(self, version: int) -> int:
        self.asked.append(version)
        if version == 3:
            raise RequestError("version", "3 is not kept", "send one of 0, 2")
        return 9


class Stream:
    async def __aiter__(self) -> AsyncIterator[RoundOutput]:
        yield RoundOutput("a", (1,), usage=Usage(5, 1))
        await asyncio.sleep(60)

    def cancel(self) -> None: ...


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> IngressMetrics:
    """In place of the process's own, which has counted for other tests."""
    metrics = IngressMetrics()
    monkeypatch.setattr(process, "METRICS", metrics)
    return metrics


@pytest.fixture
def ingresses(
    tmp_path: Path, target: Target, counted: IngressMetrics, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Ingress]]:
    path = tmp_path / "keys.yaml"
    keys = (Key(name=name, hash=hash_of(SECRETS[name].encode()), scopes=scopes) for name, scopes in SCOPES.items())
    path.write_text("".join(map(as_entry, keys)))
    path.chmod(0o600)
    made = [Ingress(target, "m", 4, broadcast=broadcast, keys_file=str(path), isolates_tenants=True) for _ in range(2)]
    monkeypatch.setattr(servicer, "_this_deployment", lambda: Replicas(*made))
    monkeypatch.setattr(servicer, "_this_replica", lambda: "replica-0")
    yield made
    guard_ingress(None)


def context(name: str | None) -> RayServegRPCContext:
    return RayServegRPCContext(Connection(name))


async def abort(ingress: Ingress, name: str, request_id: str) -> bool:
    """In a task of its own, as every call has."""
    asked = ingress.AbortRequest(pb.AbortRequestRequest(request_id=request_id), context(name))
    return (await asyncio.create_task(asked)).aborted


async def running(ingress: Ingress, name: str, request_id: str) -> Any:
    """Goes on until it is ended."""
    first = asyncio.Event()

    async def read() -> list[Any]:
        request = pb.GenerateStreamRequest(text="x", request_id=request_id)
        messages = []
        async for message in ingress.GenerateStream(request, context(name)):
            messages.append(message)
            first.set()
        return messages

    task = asyncio.create_task(read())
    await first.wait()
    return task


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_request_is_ended_by_its_own_key_or_an_admin_wherever_they_ask(ingresses, asked):
    for ender in ("alice", "root"):
        request = await running(ingresses[0], "alice", "r-1")
        assert not await abort(ingresses[asked], "bob", "r-1")
        assert not await abort(ingresses[asked], "alice", "of-nobody")
        assert not request.done()
        assert await abort(ingresses[asked], ender, "r-1")
        messages = await request
        assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT


@pytest.mark.parametrize("asked", [0, 1])
async def test_an_id_is_a_keys_own(ingresses, target, asked):
    """Whoever takes another's id first has neither it refused nor found out that it is taken."""
    requests = {name: await running(ingresses[0], name, "r-1") for name in ("alice", "bob")}
    assert len({request.engine_id for request in target.asked}) == 2
    assert {request.request_id for request in target.asked} == {"r-1"}
    again = context("alice")
    with pytest.raises(RuntimeError):
        await asyncio.create_task(ingresses[0].Generate(pb.GenerateRequest(text="x", request_id="r-1"), again))
    assert again.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "'r-1'" in again.details().partition("\x1e")[0]
    assert await abort(ingresses[asked], "bob", "r-1")
    messages = await requests["bob"]
    assert {message.request_id for message in messages} == {"r-1"}
    assert messages[-1].finish_reason == pb.FINISH_REASON_ABORT
    assert not await abort(ingresses[asked], "bob", "r-1")
    assert not requests["alice"].done()
    assert await abort(ingresses[asked], "root", "r-1")
    await requests["alice"]


async def test_tokens_are_counted_as_they_come_and_salts_are_a_keys_own(ingresses, target, counted):
    tasks = [await running(ingresses[0], name, f"r-{name}") for name in ("alice", "bob")]
    try:
        text = counted.text()
        assert 'outrider:key_tokens_total{key="bob",kind="prompt"} 5' in text
        assert 'outrider:key_tokens_total{key="bob",kind="completion"} 1' in text
        alice, bob = target.asked
        assert alice.cache_salt != bob.cache_salt
        assert alice.cache_salt
        assert 0 < alice.tenant != bob.tenant > 0
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("name", [None, "outrider_wrong"])
async def test_without_a_key_nothing_reaches_a_target(ingresses, target, name):
    asked = context(name)
    with pytest.raises(RuntimeError):
        await asyncio.create_task(ingresses[0].Generate(pb.GenerateRequest(text="x"), asked))
    assert asked.code() is grpc.StatusCode.UNAUTHENTICATED
    assert target.asked == []
    with pytest.raises(RuntimeError):
        await asyncio.create_task(ingresses[0].GetServerStatus(pb.GetServerStatusRequest(), context(name)))


async def test_calls_by_handle_need_no_key(ingresses, target):
    request = pb.GenerateStreamRequest(text="x", request_id="r-1").SerializeToString()
    stream = ingresses[0].handle_stream("GenerateStream", request)
    assert pb.GenerateStreamResponse.FromString(await anext(stream)).text_delta == "a"
    await stream.aclose()
    assert len(target.asked) == 1


async def test_one_keys_answers_leave_room_for_anothers(ingresses, monkeypatch):
    """Of nine, eight: see test_shares."""
    ingress = ingresses[0]
    monkeypatch.setattr(ingress, "_admission", Admission(LimitsConfig(max_sequences=9)))
    tasks = [await running(ingress, "alice", f"r-{number}") for number in range(8)]
    try:
        asked = context("alice")
        with pytest.raises(RuntimeError, match="no room for more requests of this key"):
            await asyncio.create_task(ingress.Generate(pb.GenerateRequest(text="x"), asked))
        assert asked.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(asked.trailing_metadata())[REQUEST_ID_METADATA]
        tasks.append(await running(ingress, "bob", "r-bob"))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def revert(ingress, name, version):
    asked = context(name)
    try:
        return await asyncio.create_task(ingress.RevertDrafter(pb.RevertDrafterRequest(version=version), asked)), asked
    except RuntimeError:
        return None, asked


async def test_drafters_go_back_for_an_admin_alone(ingresses, target):
    for name in ("alice", "watcher", None):
        answer, asked = await revert(ingresses[0], name, 2)
        assert answer is None
        assert asked.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    assert target.asked == []
    answer, _ = await revert(ingresses[0], "root", 0)
    assert answer.serving == 9
    assert target.asked == [0]


@pytest.mark.parametrize(("version", "said"), [(None, "version: is missing; send the"), (3, "version: 3 is not kept")])
async def test_a_version_that_cannot_be_gone_back_to_is_refused_by_its_field(ingresses, version, said):
    _, asked = await revert(ingresses[0], "root", version)
    assert asked.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert asked.details().startswith(said)
