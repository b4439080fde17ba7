"""A replica's heartbeat when its registry dies, hangs or cannot be had. Ray is scripted."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors.serving import registry_client
from outrider.actors.serving.registry_client import RegistryClient
from outrider.cluster.drafter_registry import Member

SOON_S = 60.0


class Registry:
    """Raises error, where there is one, at whoever asks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.heard: queue.Queue[Any] = queue.Queue()
        self.renew = SimpleNamespace(remote=self._hear)
        self.leave = SimpleNamespace(remote=self._hear)

    def _hear(self, said: Any) -> Any:
        if self.error is None:
            self.heard.put(said)
        return self

    def next(self) -> Any:
        return self.heard.get(timeout=SOON_S)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a search for the registry finds, the last one again and again."""
    registries: list[Any] = []

    def search(app_name: str) -> Any:
        registry = registries.pop(0) if len(registries) > 1 else registries[0]
        if isinstance(registry, Exception):
            raise registry
        return registry

    def get(answer: Registry, timeout: float) -> None:
        if answer.error is not None:
            raise answer.error

    monkeypatch.setattr(registry_client, "get_or_create_registry", search)
    monkeypatch.setattr(registry_client.ray, "get", get)
    monkeypatch.setattr(registry_client, "RETRY_S", 0.001)
    return registries


@pytest.mark.parametrize(
    "trouble",
    [
        ValueError("the name was given up just then"),
        Registry(ray.exceptions.RayActorError()),
        Registry(ray.exceptions.GetTimeoutError()),
    ],
    ids=["no name", "dead", "hangs"],
)
def test_another_registry_is_told_where_one_does_not_answer(found: list[Any], trouble: Any) -> None:
    found += [trouble, trouble, new := Registry()]
    registered = RegistryClient("app", Member("r-1", "D1"))
    assert new.next() == Member("r-1", "D1")
    registered.leave(SOON_S)
    assert new.next() == "r-1"


def test_a_registry_that_dies_later_is_replaced(found: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "HEARTBEAT_S", 0.001)
    found += [first := Registry(), second := Registry()]
    registered = RegistryClient("app", Member("r-1"))
    first.next()
    first.error = ray.exceptions.RayActorError()
    assert second.next() == Member("r-1")
    registered.leave(SOON_S)


def test_what_changes_is_told_at_once(found: list[Any]) -> None:
    found.append(registry := Registry())
    registered = RegistryClient("app", Member("p-1", pooled=True))
    registry.next()
    registered.update(drafter="D1")
    assert registry.next() == Member("p-1", "D1", pooled=True)
    registered.leave(SOON_S)
    assert registry.next() == "p-1"


async def test_draining_without_a_registry_is_tried_again_by_who_asks(found: list[Any]) -> None:
    found.append(ValueError("none"))
    registered = RegistryClient("app", Member("p-1"))
    with pytest.raises(TimeoutError):
        await registered.drain()
    registered.leave(SOON_S)
