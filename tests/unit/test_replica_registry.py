"""A replica that loses its registry, or has one that stands still, without an engine: looking for it holds nothing else
up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors.serving import lease
from outrider.actors.serving.lease import Lease
from outrider.cluster.membership import Member


class Registry:
    def __init__(self, error: Exception | None = None, silent: float = 0) -> None:
        """silent: to so many calls, the first."""
        self._error, self._silent = error, silent
        self.renewed: list[tuple[Any, ...]] = []
        self.renew = SimpleNamespace(remote=self._renew)
        self.leave = SimpleNamespace(remote=lambda replica: None)

    def _renew(self, *args: Any) -> Any:
        self.renewed.append(args)
        answer: Future[None] = Future()
        if len(self.renewed) <= self._silent:
            return SimpleNamespace(future=lambda: answer)
        answer.set_exception(self._error) if self._error is not None else answer.set_result(None)
        return SimpleNamespace(future=lambda: answer)


class Gcs:
    """Where registries are found, once it is back."""

    def __init__(self, *found: Any) -> None:
        self._found = list(found)
        self.back = threading.Event()
        self.asked = 0

    def get_or_create(self, app_name: str) -> Any:
        self.asked += 1
        assert self.back.wait(60)
        answer = self._found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


MEMBER = Member("r-1")


def of_lost(registry: Registry) -> Any:
    """A lease that the replica had taken there."""
    made: Any = Lease.__new__(Lease)
    made.member, made._app_name, made._registry, made._finding = MEMBER, "app", registry, None
    made._keeping = None
    return made


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_REGISTRY_PAUSE_S", 0.0)


DEAD = ray.exceptions.RayActorError()


async def test_the_loop_goes_on_while_ray_waits_for_its_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Registry()
    gcs = Gcs(new)
    monkeypatch.setattr(lease, "get_or_create_registry", gcs.get_or_create)
    renewal = asyncio.ensure_future(of_lost(Registry(DEAD)).renew(10.0))
    async with asyncio.timeout(60):
        while not (gcs.asked or renewal.done()):  # noqa: ASYNC110 - it is asked in a thread
            await asyncio.sleep(0.001)
    assert gcs.asked, "no other registry is looked for"
    gcs.back.set()  # only a loop that goes on comes here
    await renewal
    assert new.renewed == [(MEMBER, 10.0)]


def impatient(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Gcs, Registry]:
    """A replica that has lost its registry and waits for nothing, where it looks, and what is found there."""
    monkeypatch.setattr(lease, "CONTROL_TIMEOUT_S", 0.01)
    new = Registry()
    gcs = Gcs(new)
    monkeypatch.setattr(lease, "get_or_create_registry", gcs.get_or_create)
    return of_lost(Registry(DEAD)), gcs, new


async def test_a_search_that_takes_long_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searching, gcs, new = impatient(monkeypatch)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await searching.renew(10.0)
    monkeypatch.setattr(lease, "CONTROL_TIMEOUT_S", 30.0)
    gcs.back.set()
    await searching.renew(10.0)
    assert gcs.asked == 1, "threads would pile up"
    assert new.renewed == [(MEMBER, 10.0)]


async def test_what_a_search_finds_when_nobody_waits_any_more_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    searching, gcs, new = impatient(monkeypatch)
    with pytest.raises(TimeoutError):
        await searching.renew(10.0)
    gcs.back.set()
    async with asyncio.timeout(60):
        while not searching._finding.done():  # noqa: ASYNC110 - it is found in a thread
            await asyncio.sleep(0.001)
    monkeypatch.setattr(lease, "CONTROL_TIMEOUT_S", 30.0)
    await searching.renew(10.0)
    assert (gcs.asked, new.renewed) == (1, [(MEMBER, 10.0)])


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ValueError("no actor of that name")])
async def test_a_search_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    new = Registry()
    gcs = Gcs(error, new)
    gcs.back.set()
    monkeypatch.setattr(lease, "get_or_create_registry", gcs.get_or_create)
    await of_lost(Registry(DEAD)).renew(10.0)
    assert (gcs.asked, len(new.renewed)) == (2, 1)


async def test_a_replica_starts_where_no_registry_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves without, and goes on asking."""
    found = [Registry(DEAD)]
    monkeypatch.setattr(lease, "_REGISTRY_PAUSE_S", 0.001)
    monkeypatch.setattr(lease, "get_or_create_registry", lambda app_name: found[-1])
    await of_lost(found[-1]).take()
    found.append(Registry())
    taking = of_lost(Registry(DEAD))
    taking.keep()
    async with asyncio.timeout(60):
        while not found[-1].renewed:  # noqa: ASYNC110 - it is asked by a task
            await asyncio.sleep(0.001)
    taking.leave()
