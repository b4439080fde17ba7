"""What an operator hears of a pool whose drafters do not load, and that such a pool is not waited for at start-up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from outrider.actors.serving.drafter_pool import MOST_OF_A_REASON, reason
from outrider.actors.serving.waiting import TO_LOAD
from outrider.cluster.config import parse_config
from outrider.deploy import server
from outrider.deploy.processes import StopSignal
from outrider.deploy.progress import Progress
from outrider.deploy.server import TRIES_AGAIN, Server, has_come_up, has_given_up

DAMAGED, NO_MEMORY = "SafetensorError: incomplete", "ValueError: no memory for 12 KV blocks"
A, B = ("DrafterPool", "a"), ("DrafterPool", "b")


class Operator:
    """Hears what a server says of its pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.troubles: dict[tuple[str, str], str] | Exception = {}
        self._said = io.StringIO()
        self.server = Server(parse_config({"target": {"model": "none"}}), StopSignal(), Progress(self._said))
        monkeypatch.setattr(server, "troubled_drafters", self._ask)

    def _ask(self, app_name: str) -> dict[tuple[str, str], str]:
        if isinstance(self.troubles, Exception):
            raise self.troubles
        return self.troubles

    def hears(self, pool: str | tuple[str, str] = "UPDATING") -> list[str]:
        self._said.truncate(self._said.seek(0))
        self.server._tell_pool(application("DEPLOYING", DrafterPool=pool))
        return [line.partition("WARNING: ")[2] for line in self._said.getvalue().splitlines()]


def test_why_a_drafter_does_not_load_is_told_once_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(monkeypatch)
    assert operator.hears() == []
    operator.troubles = {A: DAMAGED, B: DAMAGED}
    assert operator.hears() == [
        f"DrafterPool replica {name} waits for {TO_LOAD} ({DAMAGED}), for 0 s by now" for name in "ab"
    ]
    assert operator.hears() == []
    operator.troubles = {A: DAMAGED, B: NO_MEMORY}
    assert operator.hears() == [f"DrafterPool replica b waits for {TO_LOAD} ({NO_MEMORY}), for 0 s by now"]
    operator.troubles = ray.exceptions.GetTimeoutError("no registry")
    assert operator.hears() == [], "it is being replaced, and nothing is over"
    operator.troubles = {B: NO_MEMORY}
    assert operator.hears() == ["DrafterPool replica a waits no more, after 0 s"]


def test_what_serve_says_of_a_pool_is_told_once_and_logs_are_read_no_oftener(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are asked for every five seconds, for as long as the server lives."""
    operator, read = Operator(monkeypatch), list[None]()
    monkeypatch.setattr(operator.server, "_log_texts", lambda: read.append(None) or [])
    fails = ("UPDATING", f"{TRIES_AGAIN} ModuleNotFoundError: No module named 'vllm'")
    (line,) = operator.hears(fails)
    assert line == f"Serve has trouble with the pool of drafters: {fails[1]}"
    assert [operator.hears(fails) for _ in range(3)] == [[], [], []]
    assert operator.hears("HEALTHY") == []
    assert operator.hears(fails) == [line], "and when it begins again"
    (line,) = operator.hears(("DEPLOY_FAILED", "tried 6 times"))
    assert line == "Serve has given up the pool of drafters: tried 6 times"
    assert len(read) == 3


def application(status: str, **deployments: str | tuple[str, str]) -> ApplicationStatusOverview:
    """deployments: Serve's status of each, or that and a message."""
    found: dict[str, Any] = {}
    for name, each in deployments.items():
        state, message = (each, "") if isinstance(each, str) else each
        running = {"RUNNING": 1} if state in ("HEALTHY", "UPSCALING") else {"STARTING": 1}
        found[name] = DeploymentStatusOverview(
            status=DeploymentStatus(state),
            status_trigger=DeploymentStatusTrigger.AUTOSCALING,
            replica_states=running,
            message=message,
        )
    return ApplicationStatusOverview(
        status=ApplicationStatus(status), message="", last_deployed_time_s=0.0, deployments=found
    )


FAILS = TRIES_AGAIN + " Error: of whatever"


@pytest.mark.parametrize("pool", ["UPDATING", ("UPDATING", FAILS), ("DEPLOY_FAILED", "6 times"), "HEALTHY"])
def test_a_server_has_started_when_all_but_the_pool_runs(pool: str | tuple[str, str]) -> None:
    status = "DEPLOY_FAILED" if pool == ("DEPLOY_FAILED", "6 times") else "DEPLOYING"
    for target in ("HEALTHY", "UPSCALING"):
        app = application(status, Ingress="HEALTHY", Target=target, DrafterPool=pool)
        assert has_come_up(app)
        assert not has_given_up(app)
    for target in ("UPDATING", ("UPDATING", FAILS)):
        loading = application(status, Ingress="HEALTHY", Target=target, DrafterPool=pool)
        assert not has_come_up(loading)
        assert has_given_up(loading) == (target != "UPDATING"), "a target that fails is the end of the start"


def test_without_a_pool_everything_is_waited_for() -> None:
    assert not has_come_up(application("DEPLOYING", Ingress="HEALTHY", Target="HEALTHY"))
    assert has_come_up(application("RUNNING", Ingress="HEALTHY", Target="HEALTHY"))
    assert not has_come_up(application("DEPLOYING"))
    assert has_given_up(application("DEPLOY_FAILED"))


def test_a_reason_is_what_was_raised_last() -> None:
    wrapped = "The actor died: its constructor raised\n  File x.py, line 3\n    load()\nOSError: no such file\n\n"
    assert reason(ray.exceptions.RayError(wrapped)) == "OSError: no such file"
    assert reason(ValueError()) == "ValueError"
    assert len(reason(ValueError("x" * 1000))) == MOST_OF_A_REASON
