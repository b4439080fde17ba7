"""Every rank of a target and of a drafter under tensor parallelism killed, stopped and slowed under load; one of
each stopped for good.

Of other files: a Verifier, which is the target's rank 0, and a drafter of one rank (test_processes.py); a rank of a
pipeline stage (tests/integration/test_pipeline.py).
"""

from __future__ import annotations

import pytest

from tests.faulted import Faulted, check_all_is_well, check_nothing_is_left, kill, only, stop_for_good
from tests.processes import DRAFTER, VERIFIER
from tests.serving import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

TARGETS = (VERIFIER, "TargetRank-1")
DRAFTERS = (DRAFTER, "DrafterRank-0", "DrafterRank-1")
FOR_GOOD = "stopped for good"


def harm(deployment: Deployment, what: str, how: str, *, cut: bool) -> None:
    """cut: its end takes with it what runs."""
    ends = how in ("killed", FOR_GOOD)
    with Faulted(deployment) as fault:
        pid = only(deployment, what)
        if how == "killed":
            check_nothing_is_left(kill(deployment, what))
        elif ends:
            stop_for_good(deployment, what)
        else:
            fault.hold_up(pid, how)
        fault.whole_again()
    fault.check(cut=cut and ends)
    assert (only(deployment, what) == pid) != ends
    check_all_is_well(deployment)


def cases(whats: tuple[str, ...]) -> pytest.MarkDecorator:
    """The last one is stopped for good, too: whichever it is, the others stand still with it."""
    hows = [(what, how) for what in whats for how in ("slowed", "stopped", "killed")]
    return pytest.mark.parametrize(("what", "how"), [*hows, (whats[-1], FOR_GOOD)])


@cases(TARGETS)
def test_a_rank_of_the_target(both_tp2: Deployment, what: str, how: str) -> None:
    """What runs waits for it, or is told that it is gone."""
    harm(both_tp2, what, how, cut=True)


@cases(DRAFTERS)
def test_a_rank_of_the_drafter_costs_speculation_only(drafter_tp2: Deployment, what: str, how: str) -> None:
    harm(drafter_tp2, what, how, cut=False)
