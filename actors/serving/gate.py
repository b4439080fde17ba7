"""Who may go on in a proxy: room for generations, turns for the calls beside them, and what is only on its way.

A call costs proxy and ingress several milliseconds before it can be refused, so that of a burst of hundreds the last
would be told of a full queue seconds late. The ingress tells with its answers how many requests it and the targets can
hold and queue together; a proxy that has so many in flight refuses the next itself, in a fraction of a millisecond
(Gate), and likewise what one key would have beyond its share. What it lets through may still be refused by the
ingress: a proxy knows of its own calls only.

Calls beside generations have budgets of their own, so that no number of them takes the processor or the places that
generations need: turns, a few a second (outrider.actors.serving.lanes). What has not come in yet, or has not been read
yet, takes no place, and there is a limit to all of it together (Room). gRPC and HTTP share these (Doors).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.util import metrics

from outrider.actors.serving.connections import connections_of
from outrider.actors.serving.lanes import Lane
from outrider.actors.serving.shares import Shares
from outrider.cluster.limits import LimitsConfig, from_environment

CAPACITY_METADATA = "outrider-capacity"
"""Trailing metadata of gRPC answers, and header of HTTP's: how many generations can be held and queued together."""

REFUSED = "outrider-refused"
"""What a proxy adds to a generation that it lets through: how many it has refused since the one before. Metadata of a
gRPC call, and a key of an HTTP request's scope, where no client can write. Autoscaling goes by it."""

_LOG_EVERY_S = 10.0

AT_ONCE_S = 0.25
"""A request that comes within this of its call was sent with it: a burst of such is no crowd of idle callers."""

MOST_REFLECTING = 16
"""Streams of questions about the API, half of them from one address."""

QUICK_CALLS = 4
"""So many times as often as status may requests be aborted, and texts tokenised."""

logger = logging.getLogger("ray.serve.outrider.proxy")


class Gate:
    """Of one application in one proxy, for the event loop of that."""

    def __init__(self, name: str) -> None:
        """name: what log lines call the calls."""
        self._name = name
        self._capacity: int | None = None
        self._in_flight = 0
        self._shares = Shares()
        self._told_s = float("-inf")
        self._untold = 0
        self.refused = 0

    def learn(self, capacity: str | bytes) -> None:
        """As the ingress sent it. What is no positive number is passed over."""
        text = capacity.decode("ascii", "replace") if isinstance(capacity, bytes) else capacity
        if text.isascii() and text.isdigit() and int(text):
            self._capacity = int(text)

    @property
    def is_full(self) -> bool:
        return self._capacity is not None and self._in_flight >= self._capacity

    def enter(self, key: str | None = None) -> bool:
        """Whether the call may go on; `leave` has to follow then. All may while nothing has been learnt. key: the name
        of the one that it came in with."""
        if self._capacity is None or (
            not self.is_full and self._shares.allow(key, 1, self._capacity - self._in_flight)
        ):
            self._in_flight += 1
            self._shares.take(key, 1)
            return True
        self.refused += 1
        self._untold += 1
        if (now := time.monotonic()) - self._told_s >= _LOG_EVERY_S:
            self._told_s = now
            room = "as many as there is room for" if self.is_full else f"room for no more of key {key}"
            logger.warning("%s: %d in flight, %s: refused", self._name, self._in_flight, room)
        return False

    def leave(self, key: str | None = None) -> None:
        """key: as it entered with."""
        self._in_flight -= 1
        self._shares.give_back(key, 1)

    def untold(self) -> int:
        """How many were refused since this was asked."""
        untold, self._untold = self._untold, 0
        return untold


class Gates:
    """Of one API in one proxy, an application each."""

    def __init__(self, api: str) -> None:
        """api: ``grpc`` or ``http``."""
        self._api = api
        self._gates: dict[str, Gate] = {}
        self._refusals: metrics.Counter | None = None

    def of(self, application: str) -> Gate:
        """application: as Serve routes to it (Routes), not as a client calls it."""
        gate = self._gates.get(application)
        if gate is None:
            gate = self._gates[application] = Gate(f"{self._api} calls of application {application[:60]!r}")
        return gate

    def count_refusal(self) -> None:
        """In Ray's metrics: no ingress hears of it."""
        if self._refusals is None:
            description = "Calls that a proxy refused because there was no room or no turn for them."
            self._refusals = metrics.Counter("outrider_proxy_refusals", description, ("api",))
        self._refusals.inc(tags={"api": self._api})


class Guest:
    """What is in a Room. caller: whose it is. on_put_out: called once, when somebody else needed the room."""

    def __init__(self, caller: str, on_put_out: Callable[[], object]) -> None:
        self.num_bytes = 0
        self.caller, self.on_put_out = caller, on_put_out


class Room:
    """For what waits for its caller: requests that are on their way, answers that nobody reads. When there is too much
    of it, the oldest of whoever has most is put out: who does nothing makes room for who comes, and no number of one
    caller's for another's."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._guests: OrderedDict[Guest, None] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, caller: str, on_put_out: Callable[[], object]) -> Guest:
        """caller: see outrider.actors.serving.access.guard.caller_at. `leave` has to follow, whether it was put out or
        not."""
        guest = Guest(caller, on_put_out)
        self._guests[guest] = None
        self._put_out()
        return guest

    def holds(self, guest: Guest, num_bytes: int) -> None:
        """So much of it, now."""
        if guest in self._guests:
            self.num_bytes += num_bytes - guest.num_bytes
            guest.num_bytes = num_bytes
            self._put_out()

    def leave(self, guest: Guest) -> None:
        if guest in self._guests:
            del self._guests[guest]
            self.num_bytes -= guest.num_bytes

    def _put_out(self) -> None:
        while (too_many := len(self._guests) > self._most) or (
            self.num_bytes > self._most_bytes and len(self._guests) > 1
        ):
            held: Counter[str] = Counter()
            for guest in self._guests:
                held[guest.caller] += 1 if too_many else guest.num_bytes
            oldest = max(self._guests, key=lambda guest: held[guest.caller])  # the first of those that are equal
            self.leave(oldest)
            oldest.on_put_out()


class RequestLate(Exception):
    """A request did not come in time."""


class NotAwaited(Exception):
    """Too many are awaited, this one for longest of its caller's, who has most."""


class Arrival:
    """A request on its way to a proxy. caller: as for a Room."""

    def __init__(self, doors: Doors, caller: str) -> None:
        self._caller = caller
        self._room, self._timeout_s = doors.awaited, doors.limits.receive_timeout_s
        self._guest: Guest | None = None
        self._num_bytes = 0

    def grew(self, num_bytes: int) -> None:
        """So much of it is there."""
        self._num_bytes = num_bytes
        if self._guest is not None:
            self._room.holds(self._guest, num_bytes)

    async def wait_for(self, reading: asyncio.Future[Any]) -> None:
        """Until reading is done; it is cancelled otherwise. Raises RequestLate or NotAwaited."""
        at_once_s = min(AT_ONCE_S, self._timeout_s)
        try:
            await asyncio.wait([reading], timeout=at_once_s)
            if not reading.done():
                self._guest = self._room.enter(self._caller, reading.cancel)
                self.grew(self._num_bytes)
                await asyncio.wait([reading], timeout=self._timeout_s - at_once_s)
            if not reading.done():
                raise RequestLate
            if reading.cancelled():
                raise NotAwaited
        finally:
            if self._guest is not None:
                self._room.leave(self._guest)
            reading.cancel()


@dataclass(frozen=True)
class Routes:
    """To which application a call goes: by the name that its client gave over gRPC, by the path over HTTP. None: to
    none, which Serve answers itself."""

    by_name: Callable[[str], str | None]
    by_path: Callable[[str], str | None]


class Doors:
    """What all calls of one proxy process have in common."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.limits = limits
        self.routes = Routes(lambda name: "", lambda path: "")
        """Until Serve's are known, all calls go to one application."""

        self.connections = connections_of(limits)
        self.awaited = Room(limits.max_awaited_requests, limits.max_awaited_bytes)
        self.unread = Room(limits.max_awaited_requests, limits.max_awaited_bytes)
        patience_s, per_s = limits.control_timeout_s, limits.max_control_calls_per_s
        places = max(4, int(per_s))
        self.health = Lane("for health", places, per_s=per_s, patience_s=patience_s)
        self.status = Lane("for status", places, per_s=per_s, patience_s=patience_s)
        often_s = QUICK_CALLS * per_s
        self.abort = Lane("that abort requests", places, per_s=often_s, patience_s=patience_s)
        self.tokenize = Lane(
            "that tokenise",
            limits.max_tokenize_calls,
            per_s=often_s,
            patience_s=patience_s,
            most_waiting_bytes=limits.max_awaited_bytes,
        )
        self.watch = Lane(
            "that watch health", limits.max_watch_streams, patience_s=0, most_of_one=limits.most_watch_streams_per_peer
        )
        self.reflection = Lane("for reflection", MOST_REFLECTING, patience_s=0, most_of_one=MOST_REFLECTING // 2)


@functools.cache
def doors() -> Doors:
    """This process's."""
    return Doors(from_environment())
