"""Which of several servers takes the next call: the one with the fewest requests, as far as this client can tell.

It counts its own and adds what a server said of the others' in its last answer (LoadReport). A server that could not
be reached is left alone for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from outrider.v1 import generation_pb2 as pb

LOAD_REPORT = "outrider-load-bin"
"""Trailing metadata with a serialised LoadReport. gRPC's C core keeps the one of ORCA's name to itself."""

REPORT_LIFETIME_S = 10.0
"""An older report says nothing about now."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0

_HELD = ("num_requests_running", "num_requests_waiting")


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
