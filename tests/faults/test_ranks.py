"""Every rank of a target and of a drafter under tensor parallelism killed, stopped and slowed under load.

Of other files: a Verifier, which is the target's rank 0, and a drafter of one rank (test_processes.py); a rank of a
pipeline stage (tests/integration/test_pipeline.py).
"""

from __future__ import annotations

import pytest

from tests.faulted import Faulted, check_all_is_well, check_nothing_is_left, kill, only
from tests.processes import DRAFTER, VERIFIER
from tests.serving import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

TARGETS = (VERIFIER, "TargetRank-1")
DRAFTERS = (DRAFTER, "DrafterRank-0", "DrafterRank-1")


def harm(deployment: Deployment, what: str, how: str, *, cut: bool) -> None:
    """cut: a kill takes with it what runs."""
    with Faulted(deployment) as fault:
        pid = only(deployment, what)
        if how != "killed":
            fault.hold_up(pid, how)
        else:
            lost = kill(deployment, what)
        fault.whole_again()
    fault.check(cut=cut and how == "killed")
    if how == "killed":
        check_nothing_is_left(lost)
    assert (only(deployment, what) == pid) == (how != "killed")
    check_all_is_well(deployment)


@pytest.mark.parametrize("how", ["slowed", "stopped", "killed"])
@pytest.mark.parametrize("what", TARGETS)
def test_a_rank_of_the_target(both_tp2: Deployment, what: str, how: str) -> None:
    """What runs waits for it, or is told that it is gone."""
    harm(both_tp2, what, how, cut=True)


@pytest.mark.parametrize("how", ["slowed", "stopped", "killed"])
@pytest.mark.parametrize("what", DRAFTERS)
def test_a_rank_of_the_drafter_costs_speculation_only(drafter_tp2: Deployment, what: str, how: str) -> None:
    harm(drafter_tp2, what, how, cut=False)
