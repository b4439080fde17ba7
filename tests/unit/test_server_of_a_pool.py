"""What an operator hears of a pool whose drafters do not load, and that such a pool is not waited for at start-up."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from outrider.actors.serving.drafter_pool import MOST_OF_A_REASON, reason
from outrider.deploy.liveness import TRIES_AGAIN, has_come_up, has_given_up

DAMAGED, NO_MEMORY = "SafetensorError: incomplete", "ValueError: no memory for 12 KV blocks"
A, B = ("DrafterPool", "a"), ("DrafterPool", "b")


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
