"""Runs an application's ``DrafterRegistry`` in a named Ray actor, which no round waits for."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray

from outrider.cluster.drafter_registry import Assignment, DrafterRegistry, LinkGrant, LinkReport, Member, Verifier, Work
from outrider.cluster.head import on_head
from outrider.cluster.placement import NAMESPACE

HEARTBEAT_S = 10.0
"""Time between two heartbeats of a replica."""

EXPIRES_S = 60.0
"""Time without a heartbeat after which a replica counts as gone; a registry without replicas ends itself."""


class Registry:
    """Is the registry actor, which ends itself when the last replica is gone.

    Ray does not restart it: a replica that cannot reach it makes a new one, which heartbeats and verifiers fill within
    seconds.
    """

    def __init__(self) -> None:
        self._members = DrafterRegistry()
        self._reaper: asyncio.Task | None = None

    async def renew(self, member: Member, lasts_s: float = EXPIRES_S) -> None:
        self._members.renew(member, lasts_s, time.monotonic())
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())

    async def leave(self, replica: str) -> None:
        self._members.leave(replica)

    async def drain(self, replica: str) -> list[str]:
        """See DrafterRegistry.drain."""
        return self._members.drain(replica)

    async def grant(self, verifier: Verifier, unreachable: set[str], last_epoch: int) -> LinkGrant | None:
        return self._members.grant(verifier, unreachable, last_epoch, time.monotonic())

    async def assigned_to(self, verifier: Verifier) -> Assignment:
        return self._members.assigned_to(verifier, time.monotonic())

    async def report(self, verifier: str, link: LinkReport) -> None:
        self._members.report(verifier, link)

    async def links(self) -> dict[str, LinkReport]:
        return dict(self._members.links)

    async def work(self) -> list[Work] | None:
        """Returns the work of every verifier; None: none has asked yet, since targets load or the registry is new."""
        return [verifier.work for verifier in self._members.verifiers.values()] or None

    async def drafters(self) -> dict[str, list[str]]:
        """Returns the drafters of the pool, each with the verifiers whose links to it are up."""
        pooled = (member.drafter for member in self._members.members.values() if member.pooled and member.drafter)
        return {name: self._members.users(name) for name in sorted(pooled)}

    async def troubles(self) -> dict[str, str]:
        """Returns why drafters of the pool do not load, by replica."""
        return {member.replica: member.trouble for member in self._members.members.values() if member.trouble}

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._members.expire(time.monotonic())
            if not self._members.ends:
                os._exit(0)  # exit_actor raises, which would end this task and not the actor


def registry_name(app_name: str) -> str:
    return f"Registry:{app_name}"


def get_or_create_registry(app_name: str) -> Any:
    """Returns the application's registry, which the first caller makes. It outlives each replica."""
    return (
        ray.remote(Registry)
        .options(
            name=registry_name(app_name),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            **on_head(),
        )
        .remote()
    )


def find_registry(app_name: str) -> Any:
    """Returns the running registry. Raises ValueError when there is none."""
    return ray.get_actor(registry_name(app_name), namespace=NAMESPACE)
