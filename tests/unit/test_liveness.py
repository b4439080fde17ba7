"""When a server ends because Ray, Serve or the application has ended, and when it waits for a restart."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from outrider.cluster.config import parse_config
from outrider.deploy import liveness
from outrider.deploy.liveness import ApplicationHealth, ServerDied, keep_asking
from outrider.deploy.processes import Stopped, StopSignal
from outrider.deploy.progress import Progress
from outrider.deploy.server import Server, all_serve

RUNNING = (True, True, "RUNNING")
REPLACING = (True, False, "UNHEALTHY\na replica failed its health check")
GONE = (False, False, "")


class Watched:
    """An application's health on a clock that the test moves, asked as often as the server asks."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.health = ApplicationHealth(clock=lambda: self.now)

    def during(self, seconds: float, state: tuple[bool, bool, str] | str) -> str | None:
        """Returns the first failure while the controller gives the same answer, or the same error, for so long."""
        end = self.now + seconds
        while self.now < end:
            self.now += liveness.ASK_EVERY_S
            if isinstance(state, str):
                self.health.failed(state)
            else:
                self.health.answered(*state)
            if (failure := self.health.failure()) is not None:
                return failure
        return None


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_what_is_restarted_is_no_failure(watched: Watched) -> None:
    for state, seconds in ((RUNNING, 10_000.0), (REPLACING, 600.0), ("ActorUnavailableError: restarting", 40.0)):
        for _ in range(3):
            assert watched.during(seconds, state) is None
            assert watched.during(10.0, GONE) is None, "a new controller reads its state back"
            assert watched.during(10.0, RUNNING) is None


@pytest.mark.parametrize(
    ("state", "seconds", "failure"),
    [
        (
            REPLACING,
            2_000.0,
            "the application has had no replica that serves for 905 s: UNHEALTHY a replica failed its health check",
        ),
        ("ActorDiedError:\nkilled", 100.0, "Serve's controller has not answered for 95 s (ActorDiedError: killed)"),
        (GONE, 40.0, "the application is gone; somebody else took it down"),
    ],
)
def test_what_does_not_come_back_is_a_failure(
    watched: Watched, state: tuple[bool, bool, str] | str, seconds: float, failure: str
) -> None:
    assert watched.during(seconds, state) == failure


def test_an_application_does_not_count_as_gone_while_the_controller_is_away(watched: Watched) -> None:
    assert watched.during(25.0, GONE) is None
    assert watched.during(40.0, "away") is None
    assert watched.during(5.0, RUNNING) is None


def test_asking_goes_on_after_a_failure_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ASK_EVERY_S", 0.001)
    stopped, health = threading.Event(), ApplicationHealth()
    asked = 0

    def ask() -> tuple[bool, bool, str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ConnectionError("no controller")
        stopped.set()
        return RUNNING

    keep_asking(ask, health, stopped)
    assert asked == 2
    assert health._said == "RUNNING"


def test_an_ended_daemon_of_ray_ends_the_server_unless_a_signal_came_too() -> None:
    stop = StopSignal()
    server = Server(parse_config({"target": {"model": "none"}}), stop, Progress())
    health = ApplicationHealth()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:
        server._daemons = {daemon.pid: "raylet"}
        server._check_lives(health)
        daemon.kill()
        psutil.wait_procs([psutil.Process(daemon.pid)], timeout=30)
        with pytest.raises(ServerDied, match="Ray's raylet has ended"):
            server._check_lives(health)
        stop._event.set()
        with pytest.raises(Stopped):
            server._check_lives(health)


def application(**running: int) -> ApplicationStatusOverview:
    deployments = {
        name: DeploymentStatusOverview(
            status="UNHEALTHY",
            status_trigger="UNSPECIFIED",
            replica_states={"RUNNING": number, "STARTING": 1},
            message="",
        )
        for name, number in running.items()
    }
    return ApplicationStatusOverview(status="UNHEALTHY", message="", last_deployed_time_s=0.0, deployments=deployments)


def test_a_server_whose_drafters_are_gone_serves_on() -> None:
    assert all_serve(application(Ingress=1, Target=2, DrafterPool=0))
    assert all_serve(application(Ingress=1, Target=1))
    assert not all_serve(application(Ingress=1, Target=0, DrafterPool=3))
    assert not all_serve(application(Ingress=0, Target=1))
