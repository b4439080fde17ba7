"""How long a drafter waits for the pool of all replicas' answers. The actor is scripted: nothing is slow here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from outrider.actors.drafter.shared_actor import CALL_TIMEOUT_S, START_TIMEOUT_S, SharedActor
from outrider.actors.drafter.suffix_pool import Exchange, PoolMember


class Ray:
    """The pool's actor and ray.get: a call takes as long as the script says."""

    def __init__(self, *seconds: float | Exception) -> None:
        self._script = list(seconds)
        self.found = 0
        self.timeouts: list[float] = []

    def find(self) -> Any:
        self.found += 1
        return SimpleNamespace(exchange=SimpleNamespace(remote=lambda *args: args))

    def get(self, call: Any, timeout: float) -> Exchange:
        self.timeouts.append(timeout)
        takes = self._script.pop(0)
        if isinstance(takes, Exception):
            raise takes
        if takes > timeout:
            raise ray.exceptions.GetTimeoutError(f"not within {timeout} s")
        return Exchange(("log", len(self.timeouts)), [])


def member(ray_: Ray) -> PoolMember:
    return PoolMember("one", SharedActor(ray_.find, ray_.get), list, lambda parts: None)


def test_a_pool_that_has_to_start_is_waited_for_and_one_that_runs_is_not() -> None:
    slow_start = Ray(40.0, 0.1, 40.0, 0.1)
    drafter = member(slow_start)
    drafter.exchange()
    assert drafter.failures == 0, "the first call starts a process"
    drafter.exchange()
    assert slow_start.found == 1
    drafter.exchange()
    assert drafter.failures == 1, "a pool that answered before has no reason to take so long"
    drafter.exchange()
    assert slow_start.found == 2, "it is looked up anew"
    assert slow_start.timeouts == [START_TIMEOUT_S, CALL_TIMEOUT_S, CALL_TIMEOUT_S, START_TIMEOUT_S]


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ConnectionError("no GCS")])
def test_one_that_died_is_counted_and_the_next_may_take_its_time_to_start(error: Exception) -> None:
    dying = Ray(0.1, error, 40.0)
    drafter = member(dying)
    for _ in range(3):
        drafter.exchange()
    assert (drafter.failures, dying.found) == (1, 2)
