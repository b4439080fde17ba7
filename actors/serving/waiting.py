"""Replicas and drafters that no node has room for: which, and for how long.

Ray keeps a placement group that fits nowhere, and its autoscaler sees it; nobody is told. So each ingress looks at the
groups of its application, and says in status, metrics and log what is waited for. `Waits` is the logic; `WaitingRoom`
looks again and again. How long is since this ingress saw it first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

LOOK_EVERY_S = 5.0
SAY_EVERY_S = 60.0

Group = tuple[str, str]
"""Deployment and replica whose placement group has no place, or lost one."""

logger = logging.getLogger("ray.serve.outrider.ingress")


@dataclass(frozen=True)
class Waiting:
    deployment: str
    replica: str
    needs: str
    """In words."""

    seconds: float


class Waits:
    """Pure."""

    def __init__(self, needs: Mapping[str, str]) -> None:
        """needs: of a replica of each deployment that waits for room, in words."""
        self._needs = needs
        self._since_s: dict[Group, float] = {}
        self._said_s: dict[Group, float] = {}

    def look(self, groups: Iterable[Group], now_s: float) -> list[str]:
        """groups: all that wait. Returns what is to be logged: each that begins to wait, waits still after a minute
        and each minute more, or has got its place."""
        waiting = {group for group in groups if group[0] in self._needs}
        lines = []
        for group in sorted(self._since_s.keys() - waiting):
            lines.append(f"{_named(group)} waits no more, after {now_s - self._since_s.pop(group):.0f} s")
            del self._said_s[group]
        for group in sorted(waiting):
            since_s = self._since_s.setdefault(group, now_s)
            if now_s - self._said_s.get(group, float("-inf")) >= SAY_EVERY_S:
                self._said_s[group] = now_s
                lines.append(f"{_named(group)} waits for {self._needs[group[0]]}, for {now_s - since_s:.0f} s by now")
        return lines

    def now(self, now_s: float) -> list[Waiting]:
        """As of the last look, the longest first."""
        by_age = sorted(self._since_s.items(), key=lambda item: (item[1], item[0]))
        return [Waiting(*group, self._needs[group[0]], now_s - since_s) for group, since_s in by_age]

    def by_deployment(self, now_s: float) -> dict[str, tuple[int, float]]:
        """How many of each wait, and the longest time in seconds."""
        waiting = self.now(now_s)
        number = Counter(each.deployment for each in waiting)
        longest = {each.deployment: each.seconds for each in reversed(waiting)}
        return {deployment: (number[deployment], longest.get(deployment, 0.0)) for deployment in self._needs}


class WaitingRoom:
    """`run` never ends by itself."""

    def __init__(
        self,
        find: Callable[[], list[Group]],
        needs: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """find: all groups that wait; asked in a thread, as Ray answers it in its own time."""
        self._find, self._waits, self._clock = find, Waits(needs), clock
        self._failing = False

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        try:
            groups = await asyncio.to_thread(self._find)
        except Exception as error:  # noqa: BLE001 - of whatever: what was known is known until Ray answers again
            if not self._failing:
                logger.warning("Ray does not say which replicas wait for room: %s", error)
            self._failing = True
            return
        self._failing = False
        for line in self._waits.look(groups, self._clock()):
            logger.warning("%s", line)

    def now(self) -> list[Waiting]:
        return self._waits.now(self._clock())

    def by_deployment(self) -> dict[str, tuple[int, float]]:
        return self._waits.by_deployment(self._clock())


def _named(group: Group) -> str:
    return f"{group[0]} replica {group[1]}"
