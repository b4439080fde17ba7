"""``python -m tests.bench.autoscaling_simulated``: what the policy makes of simulated load, for docs/deployment.md.

It takes seconds, and prints the same each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tests.scaling_cluster import RATE, TOKENS, Cluster, steady

ONE = RATE / TOKENS
"""Requests a second that one replica does."""

HOUR = 3600

LOADS: dict[str, Callable[[float], float]] = {
    "0.9": steady(0.9 * ONE),
    "jump to 1.8": steady(1.8 * ONE),
    "jump to 3.8": steady(3.8 * ONE),
    "jump to 6.8": steady(6.8 * ONE),
    "ramp to 5 and back in an hour": lambda now_s: max(0.1, 5 * ONE * (1 - abs(now_s - HOUR / 2) / (HOUR / 2))),
    "2.5 and 0.25, a minute each": lambda now_s: (2.5 if now_s % 120 < 60 else 0.25) * ONE,
    "0.3, and 4 for 2 s every 10 minutes": lambda now_s: (4 if now_s % 600 < 2 else 0.3) * ONE,
}


def row(load: str, load_s: float) -> str:
    cluster = Cluster({"max": 16}, load_s=load_s)
    cluster.run(HOUR, LOADS[load])
    history = cluster.history
    steps = [(second, number) for second, number in enumerate(history) if second and number != history[second - 1]]
    shown = ", ".join(f"{number} at {second} s" for second, number in steps[:4]) or "-"
    more = f", and {len(steps) - 4} more" if len(steps) > 4 else ""
    cells = (load, f"{load_s:g} s", shown + more, max(history), f"{max(cluster.waits):.0f} s", int(cluster.refused))
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    logging.disable()
    print("| load | replicas load in | replicas wanted | most | longest wait | refused |\n|---|---|---|---|---|---|")
    for load in LOADS:
        for load_s in (30.0, 180.0):
            print(row(load, load_s))


if __name__ == "__main__":
    main()
