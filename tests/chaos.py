"""Faults at random under a load of real clients (tests/callers.py), and what may not come of them.

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

from tests.callers import Excuse
from tests.processes import (
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
from tests.serving import Deployment, wait_until

AFTERMATH_S = 30.0
"""Beyond that all targets are whole again: connections and routers learn of it one after another."""

SLOWED_TO = 0.2
"""Of its time a process runs that is slowed."""

SHORTEST_S = 0.5


@dataclass(frozen=True)
class Harm:
    """What happens to whom. often: to the others'. longest_s: of what passes by itself. cuts: what runs on it is
    lost."""

    what: str
    how: Literal["killed", "stopped", "slowed"]
    often: int = 1
    longest_s: float = 3.0
    cuts: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


UNNOTICED = (
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
"""But by the speed."""

OF_DOORS = (Harm(INGRESS, "killed", cuts=True), Harm(PROXY, "killed", cuts=True))
"""Everybody's answers, and others are there within seconds."""

OF_TARGETS = (
    Harm(ENGINE_CORE, "killed", 2, cuts=True),
    Harm(VERIFIER, "killed", 2, cuts=True),
    Harm(TARGET, "killed", cuts=True),
)


@dataclass(frozen=True)
class Fault:
    harm: Harm
    at: float


class Faults:
    """One at a time, a few seconds apart. No target falls while another is down: then there would be no service."""

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
        """Wait until all targets are; what failed until then may have failed of the last fault."""
        wait_until(lambda: all_targets_are_whole(self._deployment), within_s, "all targets are whole", every_s=0.5)
        self._over_at = time.monotonic()

    def excuse(self) -> Excuse | None:
        """For calls that were cut; None: there is none."""
        cut = [fault for fault in self.done if fault.harm.cuts]
        if not cut:
            return None
        without_status = any(fault.harm.what == PROXY for fault in cut)
        return Excuse(cut[0].at, self._over_at + AFTERMATH_S, without_status)

    def __str__(self) -> str:
        counts = Counter(str(fault.harm) for fault in self.done)
        return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))

    def _strike(self, harm: Harm) -> bool:
        """Whether there was one to be harmed."""
        if harm in OF_TARGETS and not all_targets_are_whole(self._deployment):
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
    """Every process of each, and the front door knows them: a dead engine is found out some seconds later."""
    replicas = deployment.replicas()
    verifiers = len(processes(deployment).get(VERIFIER, []))
    try:
        cores = [engine_core(pid) for pid in replicas.values()]
        return len(replicas) == verifiers == len(cores) and None not in cores and deployment.all_replicas_are_known()
    except (psutil.NoSuchProcess, OSError):
        return False
