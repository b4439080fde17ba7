"""A replica's place in the registry: renewed for as long as the replica lives, at another one where one is lost."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray

from outrider.actors.serving.answers import answer_within
from outrider.cluster.membership import Member
from outrider.cluster.registry import LEASE_S, LOADING_LEASE_S, get_or_create_registry

logger = logging.getLogger("ray.serve.outrider.lease")

CONTROL_TIMEOUT_S = 5.0
_REGISTRY_ATTEMPTS = 4
_REGISTRY_PAUSE_S = 1.0


class Lease:
    """Made where a registry may be waited for; everything else belongs to one event loop."""

    def __init__(self, app_name: str, member: Member) -> None:
        self.member = member
        self._app_name = app_name
        self._registry = get_or_create_registry(app_name)
        self._finding: asyncio.Future[Any] | None = None
        """The search for the registry that is under way."""

        self._keeping: asyncio.Task[None] | None = None

    @property
    def registry(self) -> Any:
        """Its handle: of the one that is there now."""
        return self._registry

    async def take(self, lease_s: float = LOADING_LEASE_S) -> None:
        """The first one, which lasts while models load. Raises nothing: without a registry a replica that needs no link
        to start serves, too, and keep() goes on asking."""
        try:
            await self.renew(lease_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the replica starts without a registry, which is not reachable: %r", error)

    def keep(self) -> None:
        """Renew it from now on, however often this is called."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    def leave(self) -> None:
        """Give it up. Returns at once, raises nothing."""
        self._stop_keeping()
        with suppress(ray.exceptions.RayError):
            self._registry.leave.remote(self.member.replica)

    async def end(self) -> None:
        """As leave, and the registry has heard of it, where there is one: the word of a process that ends right after
        may be lost."""
        self._stop_keeping()
        with suppress(ray.exceptions.RayError, TimeoutError):
            await answer_within(self._registry.leave.remote(self.member.replica), CONTROL_TIMEOUT_S)

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def drain(self) -> list[str]:
        """See Registry.drain. Raises RayError or TimeoutError."""
        answer = self._registry.drain.remote(self.member.replica)
        users: list[str] = await answer_within(answer, CONTROL_TIMEOUT_S)
        return users

    async def renew(self, lease_s: float, attempts: int = _REGISTRY_ATTEMPTS) -> None:
        """Raises RayError or TimeoutError when neither the registry nor a new one in its place answers."""
        for attempt in range(attempts):
            try:
                if attempt > 0:
                    await asyncio.sleep(_REGISTRY_PAUSE_S)
                    self._registry = await self._find_registry()
                await answer_within(self._registry.renew.remote(self.member, lease_s), CONTROL_TIMEOUT_S)
                return
            except (ray.exceptions.RayError, TimeoutError):
                if attempt == attempts - 1:
                    raise

    async def _find_registry(self) -> Any:
        """In a thread, one at a time: Ray waits for its GCS here, for as long as that takes to come back. Raises
        RayError or TimeoutError."""
        if self._finding is None:
            self._finding = asyncio.ensure_future(asyncio.to_thread(get_or_create_registry, self._app_name))
        finding = self._finding
        try:
            return await asyncio.wait_for(asyncio.shield(finding), CONTROL_TIMEOUT_S)
        except ValueError as error:
            raise TimeoutError("the registry's name was given up between its asking and its making") from error
        finally:
            if finding.done():  # what came when nobody waited any more is for who asks next
                self._finding = None

    async def _keep(self) -> None:
        while True:
            try:
                await self.renew(LEASE_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("registry not reachable: %s", error)
            await asyncio.sleep(LEASE_S / 6)
