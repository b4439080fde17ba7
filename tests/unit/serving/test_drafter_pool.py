"""A replica of the pool whose drafter does not load: how often it is tried, who is told, and how it ends. No Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors.drafter import actor
from outrider.actors.serving import drafter_pool
from outrider.actors.serving.drafter_pool import DrafterPool
from outrider.cluster.drafter_registry import Member


class RegistryClient:
    """What is told to a registry."""

    def __init__(self) -> None:
        self.member = Member("p-1", pooled=True)
        self.has_left = False

    def update(self, **changes: Any) -> None:
        self.member = replace(self.member, **changes)

    def leave(self, wait_s: float) -> None:
        self.has_left = True


def a_drafter(*, loads: bool) -> Any:
    async def ready() -> str:
        if not loads:
            raise ray.exceptions.RayError("ray::Drafter.__init__\n  File x.py\nOSError: no such file")
        return "127.0.0.1"

    return SimpleNamespace(ready=SimpleNamespace(remote=ready))


async def test_it_is_tried_until_it_loads_ever_less_often_and_the_registry_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = [False] * 6 + [True]
    drafters, pauses, told, killed = [a_drafter(loads=each) for each in loads], [], [], []
    replica = SimpleNamespace(_registry_client=RegistryClient())

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        told.append(replica._registry_client.member.trouble)

    monkeypatch.setattr(drafter_pool.asyncio, "sleep", sleep)
    monkeypatch.setattr(ray, "kill", killed.append)
    launched = iter([ValueError("the name is taken"), *drafters])

    def launch() -> Any:
        if isinstance(drafter := next(launched), Exception):
            raise drafter
        return drafter

    pool: Any = replica
    assert await DrafterPool._load(pool, launch) is drafters[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert told == ["the name is taken", *["OSError: no such file"] * 6]
    assert killed == drafters[:-1], "its name is free for the next"


async def test_one_whose_process_dies_while_it_loads_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the first question, and starts the process anew; the next one fails, and the first with it."""
    asked: list[asyncio.Future[str]] = []

    def ready() -> asyncio.Future[str]:
        asked.append(asyncio.get_running_loop().create_future())
        if len(asked) > 1:
            for each in asked:
                each.set_exception(ray.exceptions.ActorUnavailableError("The actor is restarting.", bytes(16)))
                each.exception()
        return asked[-1]

    monkeypatch.setattr(actor, "ASK_AGAIN_S", 0.001)
    with pytest.raises(ray.exceptions.RayError, match="process died while it loaded"):
        await actor.has_loaded(SimpleNamespace(ready=SimpleNamespace(remote=ready)))


def test_one_that_is_taken_away_before_its_drafter_has_loaded_is_forgotten_at_once() -> None:
    """Else what it had told would be waited for until it expires."""
    replica: Any = SimpleNamespace(_registry_client=(registry_client := RegistryClient()))
    asyncio.run(DrafterPool.__del__(replica))
    assert registry_client.has_left
