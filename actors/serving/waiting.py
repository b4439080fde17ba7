"""Replicas and drafters that no node has room for, and a pool's that do not load: which, and for how long.

Ray keeps a placement group that fits nowhere, and its autoscaler sees it; a pool tries a drafter again that does not
load. Nobody is told. So each ingress looks at the groups of its application and at what the registry has heard, and
says in status, metrics and log what is waited for; why a drafter does not load is in the log only. `outrider serve`
says that, too. `Waits` is the logic of both; `WaitingRoom` looks again and again. How long is since this process saw it
first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

LOOK_EVERY_S = 5.0
SAY_EVERY_S = 60.0

Group = tuple[str, str]
"""Deployment and replica whose placement group has no place, or lost one, or whose drafter does not load."""

TO_LOAD = "its drafter to load, which has failed and is tried again"

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

    def __init__(self, needs: Mapping[str, str], again_s: float = SAY_EVERY_S) -> None:
        """needs: of a replica of each deployment that waits for room, in words. again_s: when it is said once more that
        something waits for the same still."""
        self._needs, self._again_s = needs, again_s
        self._waiting: dict[Group, str] = {}
        """What for, by who waits."""

        self._since_s: dict[Group, float] = {}
        self._said: dict[Group, tuple[str, float]] = {}
        """What each was said to wait for, and when."""

    def look(self, groups: Iterable[Group], now_s: float, troubles: Mapping[Group, str] | None = None) -> list[str]:
        """groups: all that wait for room. troubles: why drafters do not load. Returns what is to be logged: each that
        begins to wait, for something or for another reason than before, still waits again_s later, or waits no
        more."""
        room = {group: self._needs[group[0]] for group in groups if group[0] in self._needs}
        whys = {group: why for group, why in (troubles or {}).items() if group[0] in self._needs and group not in room}
        self._waiting = {**dict.fromkeys(whys, TO_LOAD), **room}
        lines = []
        for group in sorted(self._since_s.keys() - self._waiting.keys()):
            lines.append(f"{_named(group)} waits no more, after {now_s - self._since_s.pop(group):.0f} s")
            del self._said[group]
        for group, need in sorted(self._waiting.items()):
            since_s = self._since_s.setdefault(group, now_s)
            what = f"{need} ({whys[group]})" if group in whys else need
            said, said_s = self._said.get(group, ("", 0.0))
            if what != said or now_s - said_s >= self._again_s:
                self._said[group] = what, now_s
                lines.append(f"{_named(group)} waits for {what}, for {now_s - since_s:.0f} s by now")
        return lines

    def now(self, now_s: float) -> list[Waiting]:
        """As of the last look, the longest first."""
        by_age = sorted(self._since_s.items(), key=lambda item: (item[1], item[0]))
        return [Waiting(*group, self._waiting[group], now_s - since_s) for group, since_s in by_age]

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
        find_troubles: Callable[[], Mapping[Group, str]] = dict,
    ) -> None:
        """find: all groups that wait; find_troubles: drafters that do not load, and why. Both are asked in a thread, as
        Ray answers in its own time."""
        self._find, self._find_troubles, self._waits, self._clock = find, find_troubles, Waits(needs), clock
        self._troubles: Mapping[Group, str] = {}
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
                logger.warning("Ray does not say which replicas wait: %s", error)
            self._failing = True
            return
        self._failing = False
        with suppress(Exception):  # the registry is being replaced
            self._troubles = await asyncio.to_thread(self._find_troubles)
        for line in self._waits.look(groups, self._clock(), self._troubles):
            logger.warning("%s", line)

    def now(self) -> list[Waiting]:
        return self._waits.now(self._clock())

    def by_deployment(self) -> dict[str, tuple[int, float]]:
        return self._waits.by_deployment(self._clock())


def _named(group: Group) -> str:
    return f"{group[0]} replica {group[1]}"
