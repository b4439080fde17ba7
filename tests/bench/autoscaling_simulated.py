"""``python -m tests.bench.autoscaling_simulated``: when the policy starts and ends replicas on simulated load, and what
callers wait and are refused meanwhile. The table of docs/autoscaling.md; takes seconds, and is the same each time."""

from __future__ import annotations

from collections.abc import Callable

from outrider.actors.serving.autoscaling import ScalingPolicy
from outrider.cluster.scaling_config import AutoscalingConfig
from tests.scaling_cluster import RATE, TOKENS, Cluster, steady

ONE = RATE / TOKENS
"""Requests a second that one replica does."""

HOUR = 3600


def ramp(now_s: float) -> float:
    """To five replicas' load in half an hour, and back."""
    return max(0.1, 5 * ONE * (1 - abs(now_s - HOUR / 2) / (HOUR / 2)))


def swing(now_s: float) -> float:
    """A minute of two and a half replicas' load, a minute of a quarter of one's."""
    return 2.5 * ONE if now_s % 120 < 60 else 0.25 * ONE


def spike(now_s: float) -> float:
    """Every ten minutes what one replica does in 8 s comes within two."""
    return 4 * ONE if now_s % 600 < 2 else 0.3 * ONE


LOADS: dict[str, Callable[[float], float]] = {
    "0.9 of one replica's": steady(0.9 * ONE),
    "jump to 1.8": steady(1.8 * ONE),
    "jump to 3.8": steady(3.8 * ONE),
    "jump to 6.8": steady(6.8 * ONE),
    "ramp to 5 and back in an hour": ramp,
    "2.5 and 0.25, a minute each": swing,
    "0.3, and 4 for 2 s every 10 minutes": spike,
}


def row(load: str, load_s: float) -> str:
    cluster = Cluster(ScalingPolicy(AutoscalingConfig(max=16)), load_s=load_s)
    cluster.run(HOUR, LOADS[load])
    steps = [(second, after) for second, (before, after) in enumerate(cluster.changes(), 1) if before != after]
    shown = ", ".join(f"{number} at {second} s" for second, number in steps[:5]) or "-"
    more = f", and {len(steps) - 5} more" if len(steps) > 5 else ""
    cells = (load, f"{load_s:g} s", shown + more, max(cluster.history), f"{max(cluster.waits):.0f} s", cluster.refused)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    print("| load | replicas load in | replicas wanted | most | longest wait | refused |\n|---|---|---|---|---|---|")
    for load in LOADS:
        for load_s in (30.0, 180.0):
            print(row(load, load_s))


if __name__ == "__main__":
    main()
