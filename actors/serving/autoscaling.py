"""Decides how many target replicas the load needs.

Serve's controller calls it (``serve_adapter.autoscaling``), and applies the delays and limits.
docs/deployment.md has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from outrider.cluster.config import AutoscalingConfig

REASONS = ("steady", "queue", "kv", "round", "idle", "loading", "no_data")
"""Why a number of replicas is desired (docs/deployment.md)."""

WORK_OFF_S = 60.0
"""Time in which new replicas are to work off what waits, besides what arrives: about as long as they take to load."""

TREND_S = 10.0
"""Window in which the growth of the waiting work is measured."""

SEATS_AFTER, QUEUE_AFTER, KV_AFTER = 0.8, 0.5, 0.8
"""Shares of the seats, of target_queue_s and of target_kv_usage that one replica fewer may need. The gap to the limits
that call for more replicas prevents oscillation."""


@dataclass(frozen=True)
class Report:
    """Holds what one replica's ``record_autoscaling_stats`` returned. Serve passes on numbers only."""

    running: float
    """Requests in the engine's batch."""

    waiting: float
    """Requests that wait in the engine."""

    seats: float
    """max_num_seqs."""

    waiting_tokens: float
    """Tokens of the waiting requests, prompts and expected answers."""

    request_tokens: float
    """Tokens of a usual request, prompt and answer."""

    tokens_per_s: float
    """Measured while it was busy; 0: not yet."""

    kv_cache_usage: float
    step_ms: float
    """Median step; 0: none yet."""


@dataclass(frozen=True)
class Decision:
    """Holds a desired number of replicas and why, one of REASONS or POOL_REASONS."""

    replicas: int
    reason: str


class ScalingPolicy:
    """Decides how many replicas are desired now; Serve acts when that has held for the delays.

    Without a report nothing changes.
    """

    def __init__(self, settings: AutoscalingConfig) -> None:
        self._settings = settings
        self._backlogs: deque[tuple[float, float]] = deque()
        """Time and waiting tokens, over the last TREND_S."""

    def decide(
        self, now_s: float, wanted: int, least: int, reports: Mapping[str, Report | None], queued: float
    ) -> Decision:
        """Call about once a second.

        Args:
            now_s: Monotonic time.
            wanted: Serve's present target number of replicas.
            least: The smallest number allowed.
            reports: By running replica; None: it has not reported lately.
            queued: Requests that wait in callers' routers.
        """
        fresh = [report for report in reports.values() if report is not None]
        if not fresh:
            return Decision(wanted, "no_data" if reports else "loading")
        waiting = sum(report.waiting_tokens for report in fresh)
        waiting += queued * fmean(report.request_tokens for report in fresh)
        more = self._more(wanted, len(reports), fresh, waiting, self._growth(now_s, waiting))
        if more.replicas > wanted:
            return more
        if len(reports) < wanted:
            return Decision(wanted, "loading")
        if len(fresh) < len(reports):
            return Decision(wanted, "no_data")
        if least < wanted == len(fresh) and queued < 0.5 and self._does_with_one_less(fresh, waiting):
            return Decision(wanted - 1, "idle")
        return Decision(wanted, "steady")

    def _growth(self, now_s: float, waiting: float) -> float:
        """Returns by how many tokens a second the waiting work grows."""
        self._backlogs.append((now_s, waiting))
        while self._backlogs[0][0] < now_s - TREND_S:
            self._backlogs.popleft()
        then_s, then = self._backlogs[0]
        return (waiting - then) / (now_s - then_s) if now_s - then_s >= TREND_S / 5 else 0.0

    def _more(self, wanted: int, running: int, fresh: list[Report], waiting: float, growth: float) -> Decision:
        """Returns the largest number that a limit calls for."""
        settings, loading = self._settings, wanted > running
        calls = [Decision(min(running, wanted), "steady")]
        rate = _median(report.tokens_per_s for report in fresh)
        if rate and waiting / (rate * len(fresh)) > settings.target_queue_s:
            # What has piled up is for the replicas that load: only what comes beyond them calls for others.
            beyond = growth if loading else growth + waiting / WORK_OFF_S
            calls.append(Decision(running + math.ceil(beyond / rate), "queue"))
        if not loading:
            usage = fmean(report.kv_cache_usage for report in fresh)
            if usage > settings.target_kv_usage and waiting:
                calls.append(Decision(math.ceil(running * usage / settings.target_kv_usage), "kv"))
            step_ms = _median(report.step_ms for report in fresh if report.running)
            if settings.target_round_ms is not None and step_ms:
                number = math.ceil(running * step_ms / settings.target_round_ms)
                requests = int(sum(report.running for report in fresh))  # more replicas than requests gain nothing
                calls.append(Decision(min(number, requests), "round"))
        return max(calls, key=lambda call: call.replicas)

    def _does_with_one_less(self, fresh: list[Report], waiting: float) -> bool:
        settings, rest = self._settings, len(fresh) - 1
        requests = sum(report.running + report.waiting for report in fresh)
        if requests > SEATS_AFTER * rest * min(report.seats for report in fresh):
            return False
        rate = _median(report.tokens_per_s for report in fresh)
        if waiting > QUEUE_AFTER * settings.target_queue_s * rate * rest:
            return False
        if sum(report.kv_cache_usage for report in fresh) > KV_AFTER * settings.target_kv_usage * rest:
            return False
        if settings.target_round_ms is None or requests <= rest:
            return True
        step_ms = _median(report.step_ms for report in fresh if report.running)
        return step_ms * len(fresh) / rest <= settings.target_round_ms


def _median(values: Iterable[float]) -> float:
    """Returns the median of those that are known, which are not 0; 0: none is."""
    return median([value for value in values if value] or [0.0])
