"""A fault under load: clients that ask from before it until after it, and a server that has to be as it was."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.support.cluster.processes import alive, counted, family, processes, slowed, stopped, wait_until_counted
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, drafted, wait_until, wait_until_idle
from tests.support.load.callers import Clients, Excuse, summary, violations

NUM_CLIENTS = 3
PROMPT = list(b"to be or not to be, that is the question: to be or not to be")

REPLACED_WITHIN_S = 300.0
"""A target that loads its model anew, while others use the cores too."""

AFTERMATH_S = 30.0
"""Seconds after everything is there again in which connections and routers learn of it."""

STOPPED_S = 3.0
"""Less than the link's deadline, and than any health check's patience: it is nobody's end."""

SHARE = 0.2
"""The share of the time in which a slowed process runs."""

GIVEN_UP_WITHIN_S = 400.0
"""Serve gives up what has left three health checks in a row without an answer, each for a minute, and kills it when the
answers that it had could have ended."""


class Faulted:
    """Clients from entering to leaving the with block, and a server that has to be as it was at its end."""

    def __init__(self, deployment: Deployment, seed: int = 1) -> None:
        self.deployment = deployment
        self._seed = seed

    def __enter__(self) -> Faulted:
        self._before = counted(self.deployment)
        self.clients = Clients(self.deployment, NUM_CLIENTS, self._seed)
        self.clients.start()
        self.clients.wait_for_answers()
        self._since = time.monotonic()
        return self

    def hold_up(self, pid: int, how: str) -> None:
        """slowed: until others have had answers; stopped: for a while that is nobody's end."""
        if how == "slowed":
            with slowed(pid, SHARE):
                self.clients.wait_for_answers()
            return
        assert how == "stopped"
        with stopped(pid):
            time.sleep(STOPPED_S)

    def whole_again(self) -> None:
        """Everything that there was, and nothing beside it."""
        wait_until_counted(self.deployment, self._before, REPLACED_WITHIN_S)

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        over = time.monotonic()
        if error is None:
            self.clients.wait_for_answers()
        ended = self.clients.stop()
        if error is None:
            print(f"over after {over - self._since:.1f} s; {summary(self.clients.calls)}")
            assert ended, "a call never ended"
            assert not self.clients.crashed
            self._over = over

    def check(self, *, cut: bool, without_status: bool = False) -> None:
        excuse = Excuse(self._since, self._over + AFTERMATH_S, without_status) if cut else None
        assert violations(self.deployment, self.clients.calls, excuse) == []


def only(deployment: Deployment, what: str) -> int:
    (pid,) = processes(deployment)[what]
    return pid


def kill(deployment: Deployment, what: str) -> list[Any]:
    """The only one. Returns it and all that was beneath it, once its end is known."""
    pid = only(deployment, what)
    lost = family(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in processes(deployment).get(what, []), HANG_GUARD_S, "its end is known")
    return lost


def stop_for_good(deployment: Deployment, what: str) -> None:
    """The only one, until nothing is left of it and all that was beneath it."""
    pid = only(deployment, what)
    lost = family(pid)
    began = time.monotonic()
    with stopped(pid):
        wait_until(lambda: not alive(lost), GIVEN_UP_WITHIN_S, "it is given up, and ended")
    print(f"{what} ended {time.monotonic() - began:.1f} s after it was stopped")


def check_nothing_is_left(lost: list[Any]) -> None:
    wait_until(lambda: not alive(lost), HANG_GUARD_S, "nothing beneath it is left")


def check_all_is_well(deployment: Deployment) -> None:
    """Check that no request runs, and that drafts come."""
    wait_until_idle(deployment, HANG_GUARD_S)
    deployment.linked()
    answer = drafted(lambda: deployment.client.generate(PROMPT, temperature=0.0, max_tokens=200))
    deployment.reference.check(PROMPT, answer.token_ids, label="afterwards")
