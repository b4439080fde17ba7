"""How many generation calls a proxy lets through at once.

A call costs proxy and ingress several milliseconds before it can be refused, so that of a burst of hundreds the last
would be told of a full queue seconds late. The ingress tells with its answers how many requests it and the targets can
hold and queue together; a proxy that has so many in flight refuses the next itself, in a fraction of a millisecond.
What it lets through may still be refused by the ingress: a proxy knows of its own calls only.
"""

from __future__ import annotations

import logging
import time

from ray.util.metrics import Counter

CAPACITY_METADATA = "outrider-capacity"
"""Trailing metadata of gRPC answers, and header of HTTP's: how many generations can be held and queued together."""

_LOG_EVERY_S = 10.0
_MOST_APPLICATIONS = 64

logger = logging.getLogger("ray.serve.outrider.proxy")


class Gate:
    """Of one application in one proxy, for the event loop of that."""

    def __init__(self, name: str) -> None:
        """name: what log lines call the calls."""
        self._name = name
        self._capacity: int | None = None
        self._in_flight = 0
        self._told_s = float("-inf")
        self.refused = 0

    def learn(self, capacity: str | bytes) -> None:
        """As the ingress sent it. What is no positive number is passed over."""
        text = capacity.decode("ascii", "replace") if isinstance(capacity, bytes) else capacity
        if text.isascii() and text.isdigit() and int(text):
            self._capacity = int(text)

    def enter(self) -> bool:
        """Whether the call may go on; `leave` has to follow then. All may while nothing has been learnt."""
        if self._capacity is None or self._in_flight < self._capacity:
            self._in_flight += 1
            return True
        self.refused += 1
        if (now := time.monotonic()) - self._told_s >= _LOG_EVERY_S:
            self._told_s = now
            logger.warning("%s: %d in flight, as many as there is room for: refused", self._name, self._in_flight)
        return False

    def leave(self) -> None:
        self._in_flight -= 1


class Gates:
    """Of one API in one proxy, an application each."""

    def __init__(self, api: str) -> None:
        """api: ``grpc`` or ``http``."""
        self._api = api
        self._gates: dict[str, Gate] = {}
        self._refusals: Counter | None = None

    def of(self, application: str) -> Gate:
        """application: whatever tells its calls from another one's. Clients choose it, so not all of them are kept."""
        gate = self._gates.get(application)
        if gate is None:
            if len(self._gates) == _MOST_APPLICATIONS:  # the oldest goes; its calls leave it all the same
                del self._gates[next(iter(self._gates))]
            gate = self._gates[application] = Gate(f"{self._api} calls of application {application[:60]!r}")
        return gate

    def count_refusal(self) -> None:
        """In Ray's metrics: no ingress hears of it."""
        if self._refusals is None:
            description = "Generation calls that a proxy refused because the queue was full."
            self._refusals = Counter("outrider_proxy_refusals", description, ("api",))
        self._refusals.inc(tags={"api": self._api})
