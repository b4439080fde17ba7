"""The attempts of one call: which server each goes to, how long it may take, whether another follows.

Not gRPC's service config, whose retries stop at five attempts, take RESOURCE_EXHAUSTED for a reason whatever the server
says, do not read RetryInfo, and whose balancing does not know how many requests a server holds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.deploy.client.calls import Call
from outrider.deploy.client.error import Metadata, OutriderError
from outrider.v1 import generation_pb2 as pb

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
"""Of delays this side chooses. The server's own is taken as it is."""

LOAD_REPORT = "outrider-load-bin"
"""Trailing metadata with a serialised LoadReport. gRPC's C core keeps the one of ORCA's name to itself."""

REPORT_LIFETIME_S = 10.0
"""An older report says nothing about now."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0

_HELD = ("num_requests_running", "num_requests_waiting")


@dataclass(frozen=True)
class RetryPolicy:
    """Only what cannot have produced output is tried again: the caller asks before the first message alone.

    UNAVAILABLE: after the server's delay, or else one that doubles from FIRST_DELAY_S. RESOURCE_EXHAUSTED: only when
    the server says after what delay. Anything else fails again, or may have been paid for already.
    """

    retries: int = 0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries} is below 0; send 0 for none")

    def delay_s(self, error: OutriderError, attempt: int, seconds_left: float | None) -> float | None:
        """Seconds to wait before trying again; None: do not.

        attempt: 1 for the first call. seconds_left: of the call's time-out, None without one; a retry that could only
        start after it is none.
        """
        if attempt > self.retries:
            return None
        if error.code is grpc.StatusCode.UNAVAILABLE:
            own = min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)
            delay_s = own if error.retry_after_s is None else error.retry_after_s
        elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            delay_s = error.retry_after_s
        else:
            return None
        return delay_s if seconds_left is None or delay_s < seconds_left else None


def requests_held(metadata: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """Requests that the server which sent this trailing metadata holds. None: it did not say."""
    report = dict(metadata or ()).get(LOAD_REPORT)
    if not isinstance(report, bytes):
        return None
    try:
        metrics = pb.LoadReport.FromString(report).named_metrics
    except DecodeError:
        return None
    return sum(metrics[name] for name in _HELD) if all(name in metrics for name in _HELD) else None


@dataclass
class _Server:
    own: int = 0
    """Calls of this client under way."""

    others: float = 0.0
    """Requests of other clients, by the last report."""

    reported_s: float = float("-inf")
    picked: int = 0
    """Number of the last pick, 0 for none."""

    failures: int = 0
    rests_until_s: float = float("-inf")

    def load(self, now_s: float) -> float:
        return self.own + (self.others if now_s - self.reported_s < REPORT_LIFETIME_S else 0.0)


class Balancer:
    """Servers by number. May be shared by threads. Times are of one clock, in seconds."""

    def __init__(self, num_servers: int) -> None:
        self._servers = [_Server() for _ in range(num_servers)]
        self._lock = threading.Lock()
        self._picks = 0

    def pick(self, now_s: float, avoid: Collection[int] = ()) -> int:
        """A server for one call, which counts as under way until ``done``. Ties go round.

        avoid: servers to take only when every other one rests.
        """
        with self._lock:

            def preference(number: int) -> tuple[bool, float, bool, float, int]:
                server = self._servers[number]
                rests = server.rests_until_s > now_s
                return rests, server.rests_until_s if rests else 0.0, number in avoid, server.load(now_s), server.picked

            chosen = min(range(len(self._servers)), key=preference)
            self._picks += 1
            self._servers[chosen].own += 1
            self._servers[chosen].picked = self._picks
            return chosen

    def done(self, number: int, now_s: float, *, held: float | None = None, unreachable: bool = False) -> None:
        """The call is over. held: requests that the server says it holds. unreachable: it could not be reached, or
        lost the call: it rests, twice as long with every failure in a row."""
        with self._lock:
            server = self._servers[number]
            server.own -= 1
            if held is not None:  # without this call, which has ended there
                server.others, server.reported_s = max(0.0, held - server.own), now_s
            if unreachable:
                server.rests_until_s = now_s + min(FIRST_REST_S * 2**server.failures, LONGEST_REST_S)
                server.failures += 1
            else:
                server.failures, server.rests_until_s = 0, float("-inf")

    def other_is_up(self, now_s: float, avoid: Collection[int]) -> bool:
        """Whether a server beside those in avoid does not rest."""
        with self._lock:
            return any(
                server.rests_until_s <= now_s for number, server in enumerate(self._servers) if number not in avoid
            )

    def loads(self, now_s: float) -> list[float]:
        """Requests held, as this client sees it."""
        with self._lock:
            return [server.load(now_s) for server in self._servers]


class Attempts:
    """Every ``begin`` is followed by one ``succeeded`` or ``failed``, or by ``abandoned`` at the end. Not shared.

    clock: monotonic, seconds.
    """

    def __init__(
        self, call: Call[Any], policy: RetryPolicy, balancer: Balancer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call, self._policy, self._balancer, self._clock = call, policy, balancer, clock
        self._ends_s = None if call.timeout_s is None else clock() + call.timeout_s
        self._server: int | None = None
        self._tried: set[int] = set()
        self._begun = 0

    def begin(self) -> tuple[int, float | None]:
        """(server, seconds left for the attempt). The request's own time-out is brought down to these."""
        now_s = self._clock()
        self._begun += 1
        self._server = self._balancer.pick(now_s, self._tried)
        self._tried.add(self._server)
        left_s = None if self._ends_s is None else max(self._ends_s - now_s, 0.001)
        if left_s is not None and self._begun > 1 and "timeout_ms" in self._call.request.DESCRIPTOR.fields_by_name:
            self._call.request.timeout_ms = math.ceil(left_s * 1000)
        return self._server, left_s

    def succeeded(self, trailing: Metadata | None) -> None:
        self._done(trailing)

    def failed(self, error: OutriderError, trailing: Metadata | None, *, final: bool = False) -> float | None:
        """Seconds to wait before ``begin``; None: the call has failed for good.

        final: output has been seen, so there is no other attempt. With another server to go to there is no wait.
        """
        self._done(trailing, unreachable=error.code is grpc.StatusCode.UNAVAILABLE)
        if final:
            return None
        now_s = self._clock()
        left_s = None if self._ends_s is None else self._ends_s - now_s
        delay_s = self._policy.delay_s(error, self._begun, left_s)
        if delay_s is not None and self._balancer.other_is_up(now_s, self._tried):
            return 0.0
        return delay_s

    def abandoned(self) -> None:
        """Nobody waits any more. Without effect once the attempt is over."""
        self._done(None)

    def _done(self, trailing: Metadata | None, *, unreachable: bool = False) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            self._balancer.done(server, self._clock(), held=requests_held(trailing), unreachable=unreachable)
