"""Who is in the deployment: which drafters exist, which verifier uses which, and the epoch of every link.

``Membership`` is the logic; ``Registry`` is the named Ray actor that holds one for an application. Control only:
nothing here is on the path of a round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.cluster.link.authentication import new_secret
from outrider.cluster.placement import NAMESPACE

LEASE_S = 60.0
"""A replica that has not renewed for this long is gone; a registry without replicas ends itself."""

LOADING_LEASE_S = 3600.0
"""The first lease: a replica that loads its models cannot renew."""


@dataclass(frozen=True)
class LinkGrant:
    """Permission to build one link. epoch is greater than that of every link granted before."""

    epoch: int
    drafter: str


@dataclass
class LinkReport:
    """What a verifier last said of its link. state: ``connecting``, ``up`` or ``down``."""

    state: str
    epoch: int = 0
    drafter: str = ""
    reconnects: int = 0
    rtt_us: float = 0.0
    last_error: str = ""


class Homing:
    """When a verifier that has borrowed another's drafter goes back to its own. Pure.

    Its own must have answered every look for a while; that while doubles each time it is left again soon after, so a
    drafter that dies of every link is not run to and from.
    """

    FIRST_S, LONGEST_S = 2.0, 300.0
    SETTLED_S = 60.0
    """A link at home that lasted so long was no mistake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = self.FIRST_S
        self._ready_since: float | None = None
        self._came_home: float | None = None

    def look(self, ready: bool) -> bool:
        """While on a borrowed drafter: whether its own answers now. Returns whether to go home."""
        now = self._clock()
        if not ready:
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        return now - self._ready_since >= self._pause_s

    def went_home(self) -> None:
        self._came_home = self._clock()

    def link_ended(self) -> None:
        since, self._came_home, self._ready_since = self._came_home, None, None
        if since is not None and self._clock() - since >= self.SETTLED_S:
            self._pause_s = self.FIRST_S
        elif since is not None:
            self.failed()

    def failed(self) -> None:
        """It said that it is ready, and could not be linked to or was soon left."""
        self._ready_since = None
        self._pause_s = min(2 * self._pause_s, self.LONGEST_S)


@dataclass
class Membership:
    drafters: dict[str, str] = field(default_factory=dict)
    """Drafter name -> the replica whose bundles it sits on."""

    links: dict[str, LinkReport] = field(default_factory=dict)
    """By verifier."""

    leases: dict[str, float] = field(default_factory=dict)
    """Replica -> when its lease ends."""

    epoch: int = 0

    def renew(self, replica: str, drafter: str | None, lease_s: float, now: float) -> None:
        self.leases[replica] = now + lease_s
        if drafter is not None:
            self.drafters[drafter] = replica

    def expire(self, now: float) -> None:
        for replica in [name for name, end in self.leases.items() if end <= now]:
            self.leave(replica)

    def leave(self, replica: str) -> None:
        self.leases.pop(replica, None)
        self.links.pop(replica, None)
        for drafter in [name for name, home in self.drafters.items() if home == replica]:
            del self.drafters[drafter]

    def grant(self, verifier: str, unreachable: set[str], last_epoch: int = 0) -> LinkGrant | None:
        """The verifier's own drafter first; when that one is unreachable, the least used of the others.

        last_epoch: of the verifier's last link; a registry that was restarted has forgotten it.
        None when there is no drafter to try but unreachable ones (and none of its own).
        """
        own = [name for name, home in self.drafters.items() if home == verifier]
        others = sorted((name for name in self.drafters if name not in own), key=self._num_links)
        candidates = [name for name in own + others if name not in unreachable] or own
        if not candidates:
            return None
        self.epoch = max(self.epoch, last_epoch) + 1
        return LinkGrant(self.epoch, candidates[0])

    def home(self, verifier: str) -> str | None:
        """The verifier's own drafter; None while it is not known, as to a registry that has just been made anew."""
        return next((name for name, home in self.drafters.items() if home == verifier), None)

    def _num_links(self, drafter: str) -> int:
        return sum(link.drafter == drafter and link.state == "up" for link in self.links.values())


class Registry:
    """The Ray actor around Membership. Ends itself when the last replica's lease is over.

    Ray does not restart it: whoever misses it makes a new one, which replicas and verifiers fill again within seconds.
    """

    def __init__(self) -> None:
        self._members = Membership()
        self._secret = new_secret()
        self._reaper: asyncio.Task | None = None

    async def renew(self, replica: str, drafter: str | None, lease_s: float) -> None:
        self._members.renew(replica, drafter, lease_s, time.monotonic())
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())

    async def leave(self, replica: str) -> None:
        self._members.leave(replica)

    async def grant(self, verifier: str, unreachable: set[str], last_epoch: int) -> LinkGrant | None:
        return self._members.grant(verifier, unreachable, last_epoch)

    async def home(self, verifier: str) -> str | None:
        return self._members.home(verifier)

    async def secret(self) -> bytes:
        """Of the application: both ends of a link show each other that they hold it. Lives as long as the registry, and
        links outlive it."""
        return self._secret

    async def report(self, verifier: str, link: LinkReport) -> None:
        self._members.links[verifier] = link

    async def links(self) -> dict[str, LinkReport]:
        return dict(self._members.links)

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
            # Not on the bundles of the replica that happens to ask first: they go when that replica goes.
            scheduling_strategy=PlacementGroupSchedulingStrategy(None),
            num_cpus=0,
        )
        .remote()
    )


def application_secret(app_name: str, timeout_s: float) -> bytes:
    """See Registry.secret. Raises RayError or GetTimeoutError, ValueError when there is no registry."""
    registry = ray.get_actor(registry_name(app_name), namespace=NAMESPACE)
    secret: bytes = ray.get(registry.secret.remote(), timeout=timeout_s)
    return secret
