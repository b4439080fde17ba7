"""Faults at random under a load of real clients (tests/support/load/callers.py), and what may not come of them.

A call that is cut short has a status, UNAVAILABLE, and there was a fault that took with it what the call ran on; what
it had said until then was right; asked again, it is answered. Nothing else is lost, no token is wrong, and those that
are drawn are distributed as the target's own.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from tests.support.cluster.processes import (
    CONTROLLER,
    DRAFTER,
    ENGINE_CORE,
    INGRESS,
    POOL_REPLICA,
    PROXY,
    REGISTRY,
    TARGET,
    VERIFIER,
    engine_core,
    processes,
    slowed,
    stopped,
)
from tests.support.cluster.serving import Deployment, wait_until
from tests.support.load.callers import Excuse

AFTERMATH_S = 30.0
"""Seconds after all targets are whole again in which connections and routers learn of it."""

SLOWED_TO = 0.2
"""The share of the time in which a slowed process runs."""

SHORTEST_S = 0.5


@dataclass(frozen=True)
class Harm:
    """Says what happens to which kind of process.

    Args:
        often: how often, relative to the others.
        longest_s: of what passes by itself.
        cuts: what runs on it is lost.
    """

    what: str
    how: Literal["killed", "stopped", "slowed"]
    often: int = 1
    longest_s: float = 3.0
    cuts: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


UNNOTICED_FAULTS = (
    Harm(DRAFTER, "killed", 6),
    Harm(DRAFTER, "stopped", 4, longest_s=12.0),
    Harm(DRAFTER, "slowed", 2, longest_s=6.0),
    Harm(VERIFIER, "stopped", 3),
    Harm(VERIFIER, "slowed"),
    Harm(ENGINE_CORE, "slowed"),
    Harm(INGRESS, "stopped"),
    Harm(REGISTRY, "killed", 2),
    Harm(CONTROLLER, "killed"),
    Harm(POOL_REPLICA, "killed"),
)
"""Faults that only cost speed."""

INGRESS_FAULTS = (Harm(INGRESS, "killed", cuts=True), Harm(PROXY, "killed", cuts=True))
"""Faults that cut all answers that run; a new ingress or proxy is there within seconds."""

TARGET_FAULTS = (
    Harm(ENGINE_CORE, "killed", 2, cuts=True),
    Harm(VERIFIER, "killed", 2, cuts=True),
    Harm(TARGET, "killed", cuts=True),
)


@dataclass(frozen=True)
class Fault:
    harm: Harm
    at: float


class Faults:
    """Strikes one at a time, a few seconds apart, and no target while another is down: nothing would be served then."""

    def __init__(self, deployment: Deployment, seed: int, harms: Sequence[Harm]) -> None:
        self._deployment, self._harms = deployment, harms
        self._choose = random.Random(seed)
        self.done: list[Fault] = []
        self._over_at = float("inf")

    def run(self, seconds: float, pause_s: tuple[float, float] = (2.0, 8.0)) -> None:
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            time.sleep(self._choose.uniform(*pause_s))
            (harm,) = self._choose.choices(self._harms, [harm.often for harm in self._harms])
            at = time.monotonic()
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if self._strike(harm):
                    self.done.append(Fault(harm, at))

    def whole_again(self, within_s: float) -> None:
        """Wait until all targets are whole; what failed until then may be due to the last fault."""
        wait_until(lambda: all_targets_are_whole(self._deployment), within_s, "all targets are whole", every_s=0.5)
        self._over_at = time.monotonic()

    def excuse(self) -> Excuse | None:
        """Return the time in which calls may have been cut, or None where no fault cuts any."""
        cut = [fault for fault in self.done if fault.harm.cuts]
        if not cut:
            return None
        without_status = any(fault.harm.what == PROXY for fault in cut)
        return Excuse(cut[0].at, self._over_at + AFTERMATH_S, without_status)

    def __str__(self) -> str:
        counts = Counter(str(fault.harm) for fault in self.done)
        return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))

    def _strike(self, harm: Harm) -> bool:
        """Harm one process of the kind. Returns whether there was one."""
        if harm in TARGET_FAULTS and not all_targets_are_whole(self._deployment):
            return False
        found = sorted(processes(self._deployment).get(harm.what, []))
        if not found:
            return False
        pid = self._choose.choice(found)
        if harm.how == "killed":
            os.kill(pid, signal.SIGKILL)
            return True
        with stopped(pid) if harm.how == "stopped" else slowed(pid, SLOWED_TO):
            time.sleep(self._choose.uniform(SHORTEST_S, harm.longest_s))
        return True


def all_targets_are_whole(deployment: Deployment) -> bool:
    """Return whether every process of each is there and known to the ingress, which notices a death seconds later."""
    replicas = deployment.replicas()
    verifiers = len(processes(deployment).get(VERIFIER, []))
    try:
        cores = [engine_core(pid) for pid in replicas.values()]
        return len(replicas) == verifiers == len(cores) and None not in cores and deployment.all_replicas_are_known()
    except (psutil.NoSuchProcess, OSError):
        return False
