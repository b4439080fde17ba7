"""When a server takes what it runs on for dead, and when it waits for Serve to mend it."""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil
import pytest
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from outrider.cluster.config import parse_config
from outrider.deploy import liveness
from outrider.deploy.liveness import ApplicationJudge, ServerDied, keep_asking
from outrider.deploy.processes import Stopped, StopSignal
from outrider.deploy.progress import Progress
from outrider.deploy.server import Server, all_serve

RUNNING = (True, True, "RUNNING")
REPLACING = (True, False, "UNHEALTHY\na replica failed its health check")
GONE = (False, False, "")


class Watched:
    """A judge on a clock that the test moves, asked as often as the server asks."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.judge = ApplicationJudge(clock=lambda: self.now)

    def during(self, seconds: float, state: tuple[bool, bool, str] | str) -> str | None:
        """The first verdict while the controller says the same, or fails with the same, for so long."""
        end = self.now + seconds
        while self.now < end:
            self.now += liveness.ASK_EVERY_S
            if isinstance(state, str):
                self.judge.failed(state)
            else:
                self.judge.answered(*state)
            if (verdict := self.judge.verdict()) is not None:
                return verdict
        return None


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_running_application_is_alive(watched: Watched) -> None:
    assert watched.during(100_000.0, RUNNING) is None


def test_a_replica_that_is_replaced_is_no_death(watched: Watched) -> None:
    for _ in range(5):
        assert watched.during(600.0, REPLACING) is None
        assert watched.during(10.0, RUNNING) is None


def test_a_replica_that_never_comes_back_is_one(watched: Watched) -> None:
    verdict = watched.during(2_000.0, REPLACING)
    assert verdict == (
        "the application has had no replica that serves for 905 s: UNHEALTHY a replica failed its health check"
    )


def test_a_controller_that_ray_starts_again_is_no_death(watched: Watched) -> None:
    for _ in range(5):
        assert watched.during(40.0, "ActorUnavailableError: restarting") is None
        assert watched.during(10.0, GONE) is None, "it reads its state back"
        assert watched.during(10.0, RUNNING) is None


def test_a_controller_that_stays_away_is_one(watched: Watched) -> None:
    verdict = watched.during(100.0, "ActorDiedError:\nkilled")
    assert verdict == "Serve's controller has not answered for 95 s (ActorDiedError: killed)"


def test_a_controller_that_stands_still_is_ended_once_a_silence(watched: Watched) -> None:
    for _ in range(2):
        watched.now += 29.0
        assert not watched.judge.ends_controller()
        watched.now += 2.0
        assert watched.judge.ends_controller()
        watched.now += 20.0
        assert not watched.judge.ends_controller(), "another takes its time to start"
        watched.judge.answered(*RUNNING)


def test_an_application_that_is_taken_down_is_one(watched: Watched) -> None:
    assert watched.during(20.0, GONE) is None
    assert watched.during(10.0, RUNNING) is None
    assert watched.during(40.0, GONE) == "the application is gone; somebody else took it down"


def test_what_was_said_last_does_not_grow_old_while_the_controller_is_away(watched: Watched) -> None:
    assert watched.during(25.0, GONE) is None
    assert watched.during(40.0, "away") is None
    assert watched.during(5.0, RUNNING) is None


def test_asking_goes_on_after_a_failure_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ASK_EVERY_S", 0.001)
    stopped, judge = threading.Event(), ApplicationJudge()
    asked = 0

    def ask() -> tuple[bool, bool, str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ConnectionError("no controller")
        stopped.set()
        return RUNNING

    keep_asking(ask, judge, stopped)
    assert asked == 2
    assert judge._said == "RUNNING"


def test_a_daemon_of_rays_that_ended_is_told_unless_a_signal_came_too() -> None:
    stop = StopSignal()
    server = Server(parse_config({"target": {"model": "none"}}), stop, Progress())
    judge = ApplicationJudge()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:
        server._daemons = {daemon.pid: "raylet"}
        server._check_lives(judge)
        daemon.kill()
        psutil.wait_procs([psutil.Process(daemon.pid)], timeout=30)
        with pytest.raises(ServerDied, match="Ray's raylet has ended"):
            server._check_lives(judge)
        stop._event.set()
        with pytest.raises(Stopped):
            server._check_lives(judge)


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
