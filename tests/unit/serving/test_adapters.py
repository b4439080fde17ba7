"""Adapters that come and go while the server runs: the calls, the registry's word, and a replica that follows it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.actors.replica_calls import ReplicaReply, RequestError
from outrider.actors.serving.adapters import RunTimeAdapters, asked_of
from outrider.actors.serving.http.adapters import AdapterCalls
from outrider.actors.serving.openai.errors import HttpError
from outrider.cluster.adapters import AdapterError
from outrider.cluster.lora_config import LoraConfig
from outrider.cluster.registry import Registry
from tests.clock import Clock


class Loaded:
    """A replica's adapters. refuses: names."""

    def __init__(self, *refuses: str, **paths: str) -> None:
        self.paths, self._refuses = dict(paths), refuses
        self.said: list[str] = []

    async def load(self, name: str, path: str) -> None:
        self.said.append(f"+{name}")
        if name in self._refuses:
            raise AdapterError("cannot be; store it anew")
        self.paths[name] = path

    async def unload(self, name: str) -> bool:
        self.said.append(f"-{name}")
        return self.paths.pop(name, None) is not None


def handle(registry: Any) -> Any:
    """Ray's of a registry in this process; None: it is gone."""

    class Method:
        def __init__(self, name: str) -> None:
            self._name = name

        def remote(self, *args: Any) -> Any:
            answer: Future[Any] = Future()
            try:
                if registry is None:
                    raise ray.exceptions.RayActorError
                getattr(registry, self._name)(*args).send(None)
            except StopIteration as done:
                answer.set_result(done.value)
            except ray.exceptions.RayActorError as error:
                answer.set_exception(error)
            return SimpleNamespace(future=lambda: answer)

    return SimpleNamespace(**{name: Method(name) for name in ("adapters", "add_adapter", "remove_adapter")})


@pytest.fixture
def clock() -> Clock:
    return Clock()


def following(loaded: Loaded, registry: Any, clock: Clock, configured: tuple[str, ...] = ("a",)) -> RunTimeAdapters:
    return RunTimeAdapters(loaded, configured, asked_of(lambda: handle(registry), 5.0), clock)


async def test_a_replica_has_what_the_registry_names_and_what_is_configured(clock: Clock) -> None:
    registry, loaded = Registry(), Loaded(a="/a")
    replica = following(loaded, registry, clock)
    assert await registry.add_adapter("b", "/b") is None
    await replica.follow()
    assert loaded.paths == {"a": "/a", "b": "/b"}
    assert await registry.remove_adapter("b")
    assert await registry.add_adapter("c", "/c") is None
    await replica.follow()
    assert loaded.paths == {"a": "/a", "c": "/c"}
    assert await registry.remove_adapter("c")
    assert await registry.add_adapter("c", "/elsewhere") is None
    await replica.follow()
    assert loaded.paths == {"a": "/a", "c": "/elsewhere"}
    assert loaded.said == ["+b", "-b", "+c", "-c", "+c"]


async def test_a_name_that_is_not_there_is_asked_about_and_not_all_the_time(clock: Clock) -> None:
    """A replica that started while others were told."""
    registry, loaded = Registry(), Loaded()
    replica = following(loaded, registry, clock)
    await registry.add_adapter("b", "/b")
    await replica.find(None)
    assert loaded.paths == {}, "nothing was asked for"
    await replica.find("b")
    assert loaded.paths == {"b": "/b"}
    await registry.add_adapter("c", "/c")
    await replica.find("c")
    assert "c" not in loaded.paths, "it has just been asked"
    clock.now = 2.0
    await replica.find("c")
    assert "c" in loaded.paths


async def test_a_registry_that_is_lost_hears_of_them_from_the_replicas(clock: Clock) -> None:
    loaded = Loaded()
    lost = Registry()
    here = lost

    async def ask(known: dict[str, str] | None) -> Any:
        return await here.adapters(known)

    replica = RunTimeAdapters(loaded, (), ask, clock)
    await lost.add_adapter("b", "/b")
    await replica.follow()
    here = Registry()
    late = Loaded()
    await RunTimeAdapters(late, (), ask, clock).follow()
    assert late.paths == {}, "one that has just started has nothing to tell"
    await replica.follow()
    assert loaded.paths == {"b": "/b"}, "and nothing is taken away"
    await RunTimeAdapters(late, (), ask, clock).follow()
    assert late.paths == {"b": "/b"}


async def test_without_a_registry_everything_stays(clock: Clock) -> None:
    loaded = Loaded(b="/b")
    await following(loaded, None, clock).follow()
    assert loaded.said == []


async def test_one_that_cannot_be_loaded_here_keeps_no_other_away(clock: Clock, caplog: Any) -> None:
    registry, loaded = Registry(), Loaded("b")
    await registry.add_adapter("b", "/b")
    await registry.add_adapter("c", "/c")
    await following(loaded, registry, clock).follow()
    assert loaded.paths == {"c": "/c"}
    assert "adapter 'b' cannot be loaded here: cannot be" in caplog.text


class Replicas:
    """Those that are told. said: what came of it, by reply."""

    def __init__(self, *replies: Any) -> None:
        self._replies, self.told = replies or (None,), []

    async def broadcast(self, target: Any, method: str, *args: str, timeout_s: float) -> list[ReplicaReply]:
        self.told.append((method, args))
        if method == "unload_adapter":
            return []
        if isinstance(self._replies[0], Exception):
            raise self._replies[0]
        return [reply if isinstance(reply, ReplicaReply) else ReplicaReply("r", reply) for reply in self._replies]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    return tmp_path


def calls(directory: Path, replicas: Replicas, registry: Any) -> AdapterCalls:
    lora = LoraConfig.model_validate({"adapters": [{"name": "a", "path": "/a"}], "load_from": str(directory)})
    return AdapterCalls(None, replicas.broadcast, lora, "m", lambda: handle(registry))  # type: ignore[arg-type]


async def test_all_replicas_are_told_of_the_path_itself(directory: Path) -> None:
    replicas, registry = Replicas(None, None), Registry()
    asking = calls(directory, replicas, registry)
    said = await asking.load({"lora_name": "b", "lora_path": "x/../b", "load_inplace": False})
    assert said == "Success: LoRA adapter 'b' added successfully."
    assert await registry.adapters(None) == {"b": str(directory / "b")}
    assert await asking.unload({"lora_name": "b"}) == "Success: LoRA adapter 'b' removed successfully."
    assert await registry.adapters(None) == {}
    assert replicas.told == [("load_adapter", ("b", str(directory / "b"))), ("unload_adapter", ("b",))]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "b"}, "lora_name"),
        ({"lora_name": "", "lora_path": "b"}, "lora_name"),
        ({"lora_name": 1, "lora_path": "b"}, "lora_name"),
        ({"lora_name": "two words", "lora_path": "b"}, "lora_name"),
        ({"lora_name": "x" * 129, "lora_path": "b"}, "lora_name"),
        ({"lora_name": "m", "lora_path": "b"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "b"}, "lora_name"),
        ({"lora_name": "b"}, "lora_path"),
        ({"lora_name": "b", "lora_path": ["b"]}, "lora_path"),
        ({"lora_name": "b", "lora_path": "../b"}, "lora_path"),
        ({"lora_name": "b", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "b", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "b", "lora_path": "b", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "b", "lora_path": "b", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "b", "lora_path": "b", "base_model_name": "m"}, "base_model_name"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_its_field_and_nobody_is_told(
    directory: Path, body: Any, field: str
) -> None:
    replicas, registry = Replicas(), Registry()
    with pytest.raises(RequestError) as refused:
        await calls(directory, replicas, registry).load(body)
    assert refused.value.field == field
    assert refused.value.problem
    assert refused.value.fix
    assert replicas.told == []
    assert await registry.adapters(None) == {}


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "lora_name"), ({"lora_name": "a"}, "lora_name"), ({"lora_name": "b", "lora_int_id": 3}, "lora_int_id")],
)
async def test_what_cannot_be_unloaded_is_refused_by_its_field(directory: Path, body: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        await calls(directory, Replicas(), Registry()).unload(body)
    assert refused.value.field == field


async def test_what_is_not_loaded_cannot_be_unloaded(directory: Path) -> None:
    with pytest.raises(HttpError) as refused:
        await calls(directory, Replicas(), Registry()).unload({"lora_name": "b"})
    assert refused.value.failure.status == 404


async def test_where_one_replica_cannot_none_keeps_it(directory: Path) -> None:
    replicas, registry = Replicas(None, "its rank is 64, above 16; give another"), Registry()
    with pytest.raises(RequestError, match="lora_path: its rank is 64, above 16; give another"):
        await calls(directory, replicas, registry).load({"lora_name": "b", "lora_path": "b"})
    assert await registry.adapters(None) == {}
    assert [method for method, _ in replicas.told] == ["load_adapter", "unload_adapter"]


async def test_a_name_that_is_loaded_is_left_as_it_is(directory: Path) -> None:
    replicas, registry = Replicas(), Registry()
    await registry.add_adapter("b", "/elsewhere")
    with pytest.raises(RequestError, match="the adapter 'b' has been loaded already; unload it first"):
        await calls(directory, replicas, registry).load({"lora_name": "b", "lora_path": "b"})
    assert replicas.told == []
    assert await registry.adapters(None) == {"b": "/elsewhere"}


@pytest.mark.parametrize("reply", [ReplicaReply(None, error="late"), DeploymentUnavailableError("Target")])
async def test_a_replica_that_does_not_answer_follows_later(directory: Path, reply: Any) -> None:
    registry = Registry()
    await calls(directory, Replicas(reply), registry).load({"lora_name": "b", "lora_path": "b"})
    assert await registry.adapters(None) == {"b": str(directory / "b")}


async def test_without_a_registry_nobody_is_told(directory: Path) -> None:
    replicas = Replicas()
    with pytest.raises(HttpError) as refused:
        await calls(directory, replicas, None).load({"lora_name": "b", "lora_path": "b"})
    assert refused.value.failure.status == 503
    assert replicas.told == []
