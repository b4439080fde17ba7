"""Sends a replica's heartbeats to the registry, and creates another registry when it is lost."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from outrider.actors.serving.actor_calls import result_within
from outrider.cluster.drafter_registry import Member
from outrider.cluster.registry import HEARTBEAT_S, get_or_create_registry

logger = logging.getLogger("ray.serve.outrider.registration")

CONTROL_TIMEOUT_S = 5.0
RETRY_S = 1.0
ENDS_WITHIN_S = 2 * CONTROL_TIMEOUT_S

LOST = (ray.exceptions.RayError, TimeoutError, ValueError)
"""Errors of Ray for a registry that is dead, hangs, or is just giving its name up."""


class RegistryClient:
    """Registers a replica and sends heartbeats from a thread of its own, which also runs while models load.

    A replica serves without a registry while this looks for one.
    """

    def __init__(self, app_name: str, member: Member) -> None:
        self._app_name, self._member = app_name, member
        self._registry: Any = None
        self._due, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    @property
    def member(self) -> Member:
        return self._member

    def update(self, **changes: Any) -> None:
        """Changes fields of the member and sends it to the registry at once."""
        self._member = replace(self._member, **changes)
        self._due.set()

    def leave(self, wait_s: float = 0.0) -> None:
        """Removes the replica from the registry, and waits up to wait_s for that. Raises nothing."""
        self._over = True
        self._due.set()
        self._thread.join(wait_s)

    async def drain(self) -> list[str]:
        """See DrafterRegistry.drain. Raises RayError or TimeoutError."""
        if self._registry is None:
            raise TimeoutError("there is no registry")
        users: list[str] = await result_within(self._registry.drain.remote(self._member.replica), CONTROL_TIMEOUT_S)
        return users

    def _run(self) -> None:
        while not self._over:
            self._due.wait(HEARTBEAT_S if self._beat() else RETRY_S)
            self._due.clear()
        if self._registry is not None:
            with suppress(*LOST):
                ray.get(self._registry.leave.remote(self._member.replica), timeout=CONTROL_TIMEOUT_S)

    def _beat(self) -> bool:
        """Sends a heartbeat, to a new registry where the last one is lost. Returns whether it arrived."""
        try:
            registry = self._registry or get_or_create_registry(self._app_name)
            ray.get(registry.renew.remote(self._member), timeout=CONTROL_TIMEOUT_S)
        except LOST as error:
            logger.warning("registry not reachable: %s", error)
            self._registry = None
            return False
        self._registry = registry
        return True
