"""A row of the dashboard, its panels, and the queries that many panels ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One time series panel. queries: (expression, legend). ``$of`` stands for the label filter of a replica's
    metrics, ``$rate`` for the interval of rates."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    description: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """p50, p90, p99 over the chosen replicas."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket{{$of}}[$rate])))", f"p{q * 100:g}")
        for q in (0.5, 0.9, 0.99)
    )


def mean(histogram: str, by: str = "") -> str:
    return f"sum{by}(rate({histogram}_sum{{$of}}[$rate])) / sum{by}(rate({histogram}_count{{$of}}[$rate]))"


def ratio(above: str, below: str) -> str:
    """Of two counters, by replica."""
    return f"sum by (replica) (rate({above}[$rate])) / sum by (replica) (rate({below}[$rate]))"
