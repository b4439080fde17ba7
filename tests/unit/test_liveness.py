"""When a server ends because Serve or the application has ended, and when it waits for a restart."""

from __future__ import annotations

import pytest
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from outrider.deploy import liveness
from outrider.deploy.liveness import ApplicationHealth
from outrider.deploy.server import all_serve
from tests.support.clock import Clock

RUNNING = (True, True, "RUNNING")
REPLACING = (True, False, "UNHEALTHY\na replica failed its health check")
GONE = (False, False, "not\nthere")


class Watched:
    """An application's health on a clock that the test moves, asked as often as the server asks."""

    def __init__(self) -> None:
        self.clock = Clock(1_000.0)
        self.health = ApplicationHealth(self.clock)

    def during(self, seconds: float, state: tuple[bool, bool, str]) -> str | None:
        """Returns the first failure while Serve gives the same answer for so long."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += liveness.ASK_EVERY_S
            self.health.note(*state)
            if (failure := self.health.failure()) is not None:
                return failure
        return None


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_what_is_restarted_is_no_failure(watched: Watched) -> None:
    for state, seconds in ((RUNNING, 10_000.0), (REPLACING, 600.0), (GONE, 60.0)):
        for _ in range(3):
            assert watched.during(seconds, state) is None
            assert watched.during(10.0, RUNNING) is None


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        (
            REPLACING,
            "the application has had no replica that serves for 905 s: UNHEALTHY a replica failed its health check",
        ),
        (GONE, "Serve has not had the application for 95 s: not there"),
    ],
)
def test_what_does_not_come_back_is_a_failure(watched: Watched, state: tuple[bool, bool, str], failure: str) -> None:
    assert watched.during(2_000.0, state) == failure


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
