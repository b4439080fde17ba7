"""Replicas that do no work but say that they did: what autoscaling is tried on, where a second costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.actors.serving.autoscaling import Look, Report, ScalingPolicy

SEATS = 16
RATE = 1000.0
"""Tokens a second of one replica."""

TOKENS = 500.0
"""Of a request."""

IDLE = Report(0, 0, SEATS, 0, TOKENS, RATE, 0.0, 0.0)
BUSY = replace(IDLE, running=SEATS, kv_cache_usage=0.5, step_ms=50.0)


@dataclass
class Cluster:
    """Replicas that do RATE tokens a second each when they have SEATS requests, take load_s to load and are told of as
    Serve would. Requests beyond seats wait in the engines, beyond `held` at the callers, beyond `queue` they are
    refused."""

    policy: ScalingPolicy
    wanted: int = 1
    load_s: float = 60.0
    held: int = 64
    queue: int = 256
    now_s: float = 0.0
    running: int = 1
    requests: float = 0.0
    coming: list[float] = field(default_factory=list)
    """When each will be there."""

    refused: int = 0
    history: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    waits: list[float] = field(default_factory=list)
    """Seconds that what came last has before it, at each second."""

    def run(self, seconds: int, arrivals: Callable[[float], float]) -> None:
        """arrivals: requests that come in the second that begins now."""
        for _ in range(seconds):
            self._second(arrivals(self.now_s))

    def changes(self) -> list[tuple[int, int]]:
        """Replicas wanted before and after each second."""
        return list(zip([1, *self.history], self.history, strict=False))

    def _second(self, arrivals: float) -> None:
        self.now_s += 1
        arrived = [ready_s for ready_s in self.coming if ready_s <= self.now_s]
        self.coming = [ready_s for ready_s in self.coming if ready_s > self.now_s]
        self.running += len(arrived)
        served = min(self.requests + arrivals, self.running * RATE / TOKENS)
        self.requests += arrivals - served
        room = self.running * self.held + self.queue
        refused = max(0, int(self.requests - room))
        self.requests -= refused
        self.refused += refused
        self.waits.append(max(0.0, self.requests - self.running * SEATS) * TOKENS / (self.running * RATE))
        self._decide(self._look(served, refused))

    def _look(self, served: float, refused: int) -> Look:
        engines = min(self.requests, self.running * self.held) / self.running
        seated = min(SEATS, max(engines, served / self.running * SEATS * TOKENS / RATE))
        report = Report(seated, max(0.0, engines - SEATS), SEATS, 0, TOKENS, RATE, seated / SEATS / 2, 50.0)
        report = replace(report, waiting_tokens=report.waiting * TOKENS)
        queued = max(0.0, self.requests - self.running * self.held)
        reports = {f"r{number}": report for number in range(self.running)}
        return Look(self.now_s, self.wanted, reports, queued, refused)

    def _decide(self, look: Look) -> None:
        decision = self.policy.decide(look)
        if decision.replicas > self.wanted:
            self.coming += [self.now_s + self.load_s] * (decision.replicas - self.wanted)
        while decision.replicas < self.running + len(self.coming):
            if self.coming:
                self.coming.pop()
            else:
                self.running -= 1
        self.wanted = decision.replicas
        self.history.append(self.wanted)
        self.reasons.add(decision.reason)


def steady(a_second: float) -> Callable[[float], float]:
    return lambda now_s: a_second
