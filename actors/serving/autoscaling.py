"""How many target replicas there should be. Pure: told what is, with the time; says a number and why.

``outrider.actors.serve_seam.autoscaling`` is between this and Serve's controller, and docs/autoscaling.md says what is
promised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any

from outrider.cluster.scaling_config import AutoscalingConfig

USUAL_LOAD_S = 60.0
"""How long a replica takes to load, until one has."""

LONGEST_LOAD_S = 900.0
"""What took longer waited for a node, and says nothing of the next one."""

TREND_S = 10.0
"""Over which it is told whether more comes than is done, and how much is refused."""

_SHORTEST_TREND_S = 2.0

LAST_REFUSAL_S = 3.0
"""A refusal that is older calls for nothing any more."""

ROOM_AFTER = 0.8
"""Share of the seats that may be taken when one replica less does it all."""

QUEUE_AFTER = 0.5
KV_AFTER = 0.8
"""Likewise, shares of what calls for more: between the two nothing changes."""


@dataclass(frozen=True)
class Report:
    """What one replica says of itself. Numbers only: Serve passes nothing else on."""

    running: float
    """Requests that its engine works on."""

    waiting: float
    """Requests that wait for a seat in its engine."""

    seats: float
    """Requests that its engine can work on at once."""

    waiting_tokens: float
    """Prompts and expected answers of those that wait."""

    request_tokens: float
    """Of a usual request, prompt and answer."""

    tokens_per_s: float
    """What it has been seen to do when it was busy; 0: it was not yet."""

    kv_cache_usage: float
    step_ms: float
    """Of the median step; 0: none was made yet."""

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Report | None:
        """None for what is not all there."""
        try:
            return cls(**{name: float(values[name]) for name in cls.__dataclass_fields__})
        except KeyError:
            return None


@dataclass(frozen=True)
class Look:
    """What is there at one moment."""

    now_s: float
    """On a clock that only goes forward."""

    wanted: int
    """Replicas that Serve sees to: the last decision, or what it began with."""

    reports: Mapping[str, Report | None]
    """By running replica; None: it has said nothing lately. Those that are loading are not in it."""

    queued: float
    """Requests that wait at their callers."""

    refused: int | None
    """Requests that proxies and callers refused for lack of room since the last look; None: that is not known."""


@dataclass(frozen=True)
class Decision:
    replicas: int
    reason: str
    """One of scaling_config.REASONS."""


class ScalingPolicy:
    """`decide` is called about once a second.

    More replicas are called for when the work that waits takes longer than target_queue_s at the rate that was
    measured, when requests were refused, when KV caches are full while requests wait, or when steps are too long. How
    many more: those that do what comes beyond what is done now, and work off what waits by the time that they are
    loaded. It has to hold for upscale_delay_s, and the median of what was called for in that time is what is started.

    One replica less has to do for downscale_delay_s without a break: with every replica heard, none loading, nothing
    refused or waiting at callers, and all limits kept with room to spare.

    What is not known is no reason for anything: without a report nothing changes.
    """

    def __init__(self, settings: AutoscalingConfig) -> None:
        self._settings = settings
        self._load_s = USUAL_LOAD_S
        self._ordered_s: float | None = None
        """Since when replicas are awaited."""

        self._backlogs: deque[tuple[float, float]] = deque()
        """Time and tokens that wait."""

        self._heard: frozenset[str] = frozenset()
        """Whose the backlogs are."""

        self._refusals: deque[tuple[float, int]] = deque()
        self._calls: deque[tuple[float, int, str]] = deque()
        """Time, number and reason of each look that called for more, without a break."""

        self._spare_since: float | None = None

    def decide(self, look: Look, least: int | None = None, most: int | None = None) -> Decision:
        """least, most: instead of the configuration's min and max."""
        least = self._settings.min if least is None else least
        most = self._settings.max if most is None else most
        self._remember(look)
        bounded = min(max(look.wanted, least), most)
        if bounded != look.wanted:
            self._forget_delays()
            return Decision(bounded, "bounds")
        fresh = [report for report in look.reports.values() if report is not None]
        if not fresh:
            self._forget_delays()
            return Decision(look.wanted, "no_data" if look.reports else "loading")
        number, reason = self._called_for(look, fresh)
        if number <= look.wanted:
            self._calls.clear()
            return self._less(look, fresh, least)
        self._spare_since = None
        return self._more(look, min(number, most), reason)

    def _remember(self, look: Look) -> None:
        now = look.now_s
        if len(look.reports) < look.wanted:
            if self._ordered_s is None:
                self._ordered_s = now
        elif self._ordered_s is not None:
            # One that was away for a moment has not loaded anything.
            loaded_s = max(now - self._ordered_s, self._load_s / 2)
            self._load_s, self._ordered_s = min(loaded_s, LONGEST_LOAD_S), None
        if look.refused:
            self._refusals.append((now, look.refused))
        _drop_until(self._refusals, now - TREND_S)
        fresh = {name: report for name, report in look.reports.items() if report is not None}
        if self._heard != fresh.keys():  # what one more or less has waiting is no trend
            self._heard = frozenset(fresh)
            self._backlogs.clear()
        self._backlogs.append((now, _waiting_tokens(look, fresh.values())))
        _drop_until(self._backlogs, now - TREND_S)

    def _called_for(self, look: Look, fresh: list[Report]) -> tuple[int, str]:
        """Replicas, and what calls for most of them."""
        settings = self._settings
        there, loading = len(look.reports), look.wanted > len(look.reports)
        refused = self._refused_a_second(look.now_s)
        waiting = _waiting_tokens(look, fresh)
        rates = [report.tokens_per_s for report in fresh if report.tokens_per_s > 0]
        calls = [(min(there, look.wanted), "steady")]
        if rates:
            rate = median(rates)
            too_long = waiting / (rate * len(fresh)) > settings.target_queue_s
            if too_long or refused:
                beyond = self._growth() + refused * fmean(report.request_tokens for report in fresh)
                if not loading:  # else it is theirs to work off
                    beyond += waiting / (settings.target_queue_s + self._load_s)
                calls.append((there + math.ceil(beyond / rate), "queue" if too_long else "refused"))
        if loading:
            return max(calls, key=_number)
        if refused:
            calls.append((there + 1, "refused"))
        usage = fmean(report.kv_cache_usage for report in fresh)
        if usage > settings.target_kv_usage and waiting:
            calls.append((math.ceil(there * usage / settings.target_kv_usage), "kv"))
        steps = [report.step_ms for report in fresh if report.running and report.step_ms]
        if settings.target_round_ms is not None and steps:
            requests = int(sum(report.running for report in fresh))
            number = math.ceil(there * median(steps) / settings.target_round_ms)
            calls.append((min(number, requests), "round"))  # with one each there is nothing to part
        return max(calls, key=_number)

    def _refused_a_second(self, now_s: float) -> float:
        """0 when nothing was refused in the last moment."""
        if not self._refusals or now_s - self._refusals[-1][0] > LAST_REFUSAL_S:
            return 0.0
        number = sum(number for _, number in self._refusals)
        return number / max(now_s - self._refusals[0][0], _SHORTEST_TREND_S)

    def _growth(self) -> float:
        """Tokens a second by which the work that waits becomes more; less than 0: less."""
        (first_s, first), (last_s, last) = self._backlogs[0], self._backlogs[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= _SHORTEST_TREND_S else 0.0

    def _more(self, look: Look, number: int, reason: str) -> Decision:
        delay_s = self._settings.upscale_delay_s
        self._calls.append((look.now_s, number, reason))
        if look.now_s - self._calls[0][0] < delay_s:
            return Decision(look.wanted, reason)
        while len(self._calls) > 1 and look.now_s - self._calls[1][0] >= delay_s:
            self._calls.popleft()
        number = max(look.wanted, median_low(number for _, number, _ in self._calls))
        if number > look.wanted:
            self._calls.clear()
        return Decision(number, reason)

    def _less(self, look: Look, fresh: list[Report], least: int) -> Decision:
        if len(look.reports) < look.wanted:
            self._spare_since = None
            return Decision(look.wanted, "loading")
        if len(fresh) < len(look.reports) or look.refused is None:
            self._spare_since = None
            return Decision(look.wanted, "no_data")
        if look.wanted <= least or len(fresh) > look.wanted or not self._is_spare(look, fresh):
            self._spare_since = None
            return Decision(look.wanted, "steady")
        if self._spare_since is None:
            self._spare_since = look.now_s
        if look.now_s - self._spare_since < self._settings.downscale_delay_s:
            return Decision(look.wanted, "idle")
        self._spare_since = look.now_s  # the next one has to do as long
        return Decision(look.wanted - 1, "idle")

    def _is_spare(self, look: Look, fresh: list[Report]) -> bool:
        """Whether one less would do. Every replica is heard."""
        settings, rest = self._settings, len(fresh) - 1
        requests = sum(report.running + report.waiting for report in fresh)
        if look.queued >= 0.5 or self._refusals or requests > ROOM_AFTER * rest * min(each.seats for each in fresh):
            return False
        rates = [report.tokens_per_s for report in fresh if report.tokens_per_s > 0]
        waiting = _waiting_tokens(look, fresh)
        if waiting and not rates:
            return False
        if waiting and waiting / (median(rates) * rest) > QUEUE_AFTER * settings.target_queue_s:
            return False
        if sum(report.kv_cache_usage for report in fresh) / rest > KV_AFTER * settings.target_kv_usage:
            return False
        steps = [report.step_ms for report in fresh if report.running and report.step_ms]
        if settings.target_round_ms is None or not steps or requests <= rest:
            return True
        return median(steps) * len(fresh) / rest <= settings.target_round_ms

    def _forget_delays(self) -> None:
        self._calls.clear()
        self._spare_since = None


def _waiting_tokens(look: Look, fresh: Iterable[Report]) -> float:
    """Of those that wait in the replicas that are heard, and at their callers."""
    reports = list(fresh)
    if not reports:
        return 0.0
    at_callers = look.queued * fmean(report.request_tokens for report in reports)
    return sum(report.waiting_tokens for report in reports) + at_callers


def _drop_until(timed: deque[Any], time_s: float) -> None:
    while timed and timed[0][0] < time_s:
        timed.popleft()


def _number(call: tuple[int, str]) -> int:
    return call[0]
