"""A replica that loses its registry, or has one that stands still, without an engine: looking for it holds nothing else
up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors.serving import lease
from outrider.actors.serving.lease import STOPPED_AFTER, Lease, Silence
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
    made._silence, made._keeping = Silence(), None
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


class Ray:
    """There is one registry of the name at a time, and another once that is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Registry, attempts: int = 10_000) -> None:
        """attempts: of a search, many, for on a busy machine some of them run out of so short a time."""
        self.current, self.killed = first, list[Any]()
        monkeypatch.setattr(lease, "CONTROL_TIMEOUT_S", 0.01)
        monkeypatch.setattr(lease, "_REGISTRY_ATTEMPTS", attempts)
        monkeypatch.setattr(lease, "get_or_create_registry", lambda app_name: self.current)
        monkeypatch.setattr(lease, "replace_registry", self._replace)

    def _replace(self, app_name: str, stopped: Any) -> Any:
        self.killed.append(stopped)
        if stopped is self.current:
            self.current = Registry()
        return self.current


async def test_a_registry_that_stands_still_for_good_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_ = Ray(monkeypatch, stopped := Registry(silent=float("inf")))
    await of_lost(stopped).take()
    assert ray_.killed == [stopped]
    assert len(stopped.renewed) == STOPPED_AFTER
    assert ray_.current.renewed


async def test_so_is_one_whom_nobody_new_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray says of a stopped process to who has no connection to it."""
    ray_ = Ray(monkeypatch, stopped := Registry(ray.exceptions.ActorUnavailableError("no connection", bytes(16))))
    await of_lost(stopped).take()
    assert ray_.killed == [stopped]


async def test_one_that_stands_still_for_a_while_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_ = Ray(monkeypatch, slow := Registry(silent=STOPPED_AFTER - 1))
    taking = of_lost(slow)
    await taking.take()
    assert len(slow.renewed) == STOPPED_AFTER
    slow._silent += STOPPED_AFTER  # and once more: what was before is forgotten
    with suppress(TimeoutError):
        await taking.renew(10.0)
    assert ray_.killed == []


async def test_of_several_who_find_it_stopped_none_kills_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_ = Ray(monkeypatch, stopped := Registry(silent=float("inf")))
    await asyncio.gather(*(of_lost(stopped).take() for _ in range(4)))
    assert set(map(id, ray_.killed)) == {id(stopped)}
    assert len(ray_.current.renewed) >= 4


def test_silence_is_of_one_registry() -> None:
    silence = Silence()
    assert not any(silence.ran_out("lost") for _ in range(STOPPED_AFTER - 1))
    assert not any(silence.ran_out("new") for _ in range(STOPPED_AFTER - 1))
    assert silence.ran_out("new")


def test_whoever_reaches_none_gives_up_one_alone() -> None:
    """It may be this process that nobody hears; the others' registry is not to be made anew for ever."""
    silence = Silence()
    judged = [silence.ran_out("first") for _ in range(2 * STOPPED_AFTER)]
    judged += [silence.ran_out("second") for _ in range(2 * STOPPED_AFTER)]
    assert sum(judged) == 1
    silence.answered()
    assert sum(silence.ran_out("second") for _ in range(2 * STOPPED_AFTER)) == 1


async def test_one_that_answers_again_is_left_alone_whatever_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was to be replaced with the next search, and there was none before it answered."""
    ray_ = Ray(monkeypatch, slow := Registry(silent=STOPPED_AFTER))
    taking = of_lost(slow)
    for _ in range(STOPPED_AFTER):
        with pytest.raises(TimeoutError):
            await taking.renew(10.0, attempts=1)
    await taking.renew(10.0)
    slow._silent = len(slow.renewed) + 1
    await taking.renew(10.0, attempts=10_000)
    assert ray_.killed == []


async def test_a_replica_starts_where_no_registry_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves without, and goes on asking."""
    ray_ = Ray(monkeypatch, Registry(DEAD), attempts=4)
    await of_lost(ray_.current).take()
    ray_.current = Registry()
    taking = of_lost(Registry(DEAD))
    taking.keep()
    async with asyncio.timeout(60):
        while not ray_.current.renewed:  # noqa: ASYNC110 - it is asked by a task
            await asyncio.sleep(0.001)
    taking.leave()
