"""Lets all drafters of an application share one Ray actor.

About once a second every drafter hands over what it has and takes what is new, never on the path of a round. An actor
that is slow or gone costs what it is for, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from outrider.cluster.head import anywhere, on_head
from outrider.cluster.placement import NAMESPACE

logger = logging.getLogger(__name__)

EXCHANGE_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
"""Timeout of the first call after a look-up: the actor's process may have to start while models load."""

_LONGEST_PAUSE_S = 30.0
IDLE_LIFE_S = 120.0
"""An actor that was not called for so long ends itself: its application is gone."""


class SharedActor:
    """Calls a named actor, which the first call of any drafter starts."""

    def __init__(
        self,
        make: Callable[[], Any],
        get: Callable[..., Any] = ray.get,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """make: returns the actor's handle, which may still start; see get_or_create. get: as ray.get."""
        self._make, self._get, self._start_timeout_s = make, get, start_timeout_s
        self._actor: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method. Raises RayError or GetTimeoutError; then the next call looks the actor up again."""
        actor, self._actor = self._actor, None
        timeout_s = CALL_TIMEOUT_S
        if actor is None:
            actor, timeout_s = self._make(), self._start_timeout_s
        answer = self._get(getattr(actor, method).remote(*args), timeout=timeout_s)
        self._actor = actor
        return answer


def get_or_create(actor_class: type, name: str, *args: Any, **options: Any) -> Any:
    """Returns the handle of the actor of that name. options: Ray's; without any the actor takes no resources."""
    return (
        ray.remote(actor_class)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            **({"num_cpus": 0, **anywhere(), **options} if options else on_head()),
        )
        .remote(*args)
    )


class IdleLife:
    """Ends a shared actor's process when nobody calls it any more."""

    def __init__(self, idle_life_s: float = IDLE_LIFE_S) -> None:
        self._idle_life_s = idle_life_s
        self._asked = time.monotonic()
        self._reaper: asyncio.Task | None = None

    def asked(self) -> None:
        """Notes a call. To be called on the actor's event loop."""
        self._asked = time.monotonic()
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._idle_life_s / 4)
            if time.monotonic() - self._asked > self._idle_life_s:
                os._exit(0)  # exit_actor raises, which would end this task and not the actor


class Member:
    """Exchanges data with a shared actor for one drafter. It counts failures and never raises."""

    def __init__(self, what: str, exchange: Callable[[], bool]) -> None:
        """exchange: exchanges once, returns whether there is more at once. what: names the actor in log and thread."""
        self._what, self._exchange = what, exchange
        self._failing = False
        self.failures = 0
        """Exchanges that failed. What they carried is lost."""

    def exchange(self) -> bool:
        """Exchanges once. Returns whether there is more to be had at once."""
        try:
            more = self._exchange()
        except Exception as error:  # noqa: BLE001 - of another process; drafting goes on with what is known
            self.failures += 1
            if not self._failing:
                self._failing = True
                logger.warning("%s not reachable, drafting goes on with what this drafter has: %s", self._what, error)
            return False
        self._failing = False
        return more

    def run(self, sleep: Callable[[float], object] = time.sleep) -> None:
        """Exchanges for ever, on a thread of its own."""
        pause_s = EXCHANGE_EVERY_S
        while True:
            failures = self.failures
            more = self.exchange()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if self.failures > failures else EXCHANGE_EVERY_S
            if not more:
                sleep(pause_s)

    def start(self) -> None:
        threading.Thread(target=self.run, name=self._what.replace(" ", "-"), daemon=True).start()
