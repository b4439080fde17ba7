"""The named Ray actor that holds an application's ``Membership`` (membership.py). Control only: nothing here is on the
path of a round.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray

from outrider.cluster.head import on_head
from outrider.cluster.link.authentication import new_secret
from outrider.cluster.membership import Assignment, LinkGrant, LinkReport, Member, Membership, Place, Verifier, Work
from outrider.cluster.placement import NAMESPACE

LEASE_S = 60.0
"""A replica that has not renewed for this long is gone; a registry without replicas ends itself."""

LOADING_LEASE_S = 3600.0
"""The first lease: a replica that loads its models cannot renew."""


class Registry:
    """The Ray actor around Membership. Ends itself when the last replica's lease is over.

    Ray does not restart it: whoever misses it makes a new one, which replicas and verifiers fill again within seconds.
    """

    def __init__(self) -> None:
        self._members = Membership()
        self._secret = new_secret()
        self._reaper: asyncio.Task | None = None

    async def renew(self, member: Member, lease_s: float) -> None:
        self._members.renew(member, lease_s, time.monotonic())
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())

    async def leave(self, replica: str) -> None:
        self._members.leave(replica)

    async def drain(self, replica: str) -> list[str]:
        """See Membership.drain."""
        return self._members.drain(replica, time.monotonic())

    async def grant(self, verifier: Verifier, unreachable: set[str], last_epoch: int) -> LinkGrant | None:
        return self._members.grant(verifier, unreachable, last_epoch, time.monotonic())

    async def assigned_to(self, verifier: Verifier) -> Assignment:
        return self._members.assigned_to(verifier, time.monotonic())

    async def secret(self) -> bytes:
        """Of the application: both ends of a link show each other that they hold it. Lives as long as the registry, and
        links outlive it."""
        return self._secret

    async def report(self, verifier: str, link: LinkReport) -> None:
        self._members.report(verifier, link)

    async def links(self) -> dict[str, LinkReport]:
        return dict(self._members.links)

    async def work(self) -> list[Work] | None:
        """Of every verifier that has asked for a drafter; None: none has, of targets that load or a registry that was
        made anew."""
        return list(self._members.works.values()) or None

    async def drafters(self) -> dict[str, list[str]]:
        """Those of the pool, each with the verifiers whose links to it are up."""
        pooled = (member.drafter for member in self._members.members.values() if member.pooled and member.drafter)
        return {name: self._members.users(name) for name in sorted(pooled)}

    async def troubles(self) -> dict[str, str]:
        """By replica of the pool whose drafter does not load: why."""
        return {member.replica: member.trouble for member in self._members.members.values() if member.trouble}

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 6)
            self._members.expire(time.monotonic())
            if not self._members.leases:
                os._exit(0)  # exit_actor raises, which would end this task and not the actor


def registry_name(app_name: str) -> str:
    return f"Registry:{app_name}"


def get_or_create_registry(app_name: str) -> Any:
    """The application's registry, made by whichever replica asks first. It outlives any one replica."""
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
    """The one that there is. Raises ValueError when there is none."""
    return ray.get_actor(registry_name(app_name), namespace=NAMESPACE)


def this_place() -> Place:
    """Of this Ray process."""
    context = ray.get_runtime_context()
    return Place.of(context.get_node_id(), {name: str(value) for name, value in context.get_node_labels().items()})


def application_secret(app_name: str, timeout_s: float) -> bytes:
    """See Registry.secret. Raises RayError or GetTimeoutError, ValueError when there is no registry."""
    secret: bytes = ray.get(find_registry(app_name).secret.remote(), timeout=timeout_s)
    return secret
