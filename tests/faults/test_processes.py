"""Every kind of process of a server killed, stopped and slowed under load: what clients see, and what is left of it.

Of other files: a drafter killed, and stopped for longer than its link's deadline (test_drafter.py), one of several
targets lost, or its engine stopped (test_lost_replica.py), a rank of a pipeline stage (integration/test_pipeline.py).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import grpc
import pytest

from tests.support.cluster.pools import all_draft, is_even
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
    alive,
    counted,
    family,
    processes,
    stopped,
    wait_until_counted,
)
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, wait_until
from tests.support.load.faulted import (
    GIVEN_UP_WITHIN_S,
    REPLACED_WITHIN_S,
    Faulted,
    check_all_is_well,
    check_nothing_is_left,
    kill,
    only,
    stop_for_good,
)
from tests.support.load.streams import join, under_way

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

MOST_TOKENS = 900
"""Tokens of an answer: beside its prompt there is room for so many."""

STREAMS = 3

CUTTING = {PROXY, INGRESS, VERIFIER, ENGINE_CORE}
"""Processes whose end cuts what runs on them."""


OF_A_PAIR = [PROXY, INGRESS, TARGET, CONTROLLER, REGISTRY, DRAFTER, VERIFIER, ENGINE_CORE]
RANKS = {"both_tp2": (VERIFIER, "TargetRank-1"), "drafter_tp2": (DRAFTER, "DrafterRank-0", "DrafterRank-1")}
"""Ranks of a target and of a drafter under tensor parallelism, by deployment."""

FOR_GOOD = "stopped for good"
CASES = [
    *(("ngram_pair", what, how) for how in ("slowed", "stopped") for what in OF_A_PAIR),
    *(("ngram_pair", what, "killed") for what in (CONTROLLER, REGISTRY, INGRESS, PROXY, ENGINE_CORE, VERIFIER)),
    *((name, rank, how) for name, ranks in RANKS.items() for rank in ranks for how in ("slowed", "stopped", "killed")),
    # Whichever rank is stopped for good, the others stand still with it.
    *((name, ranks[-1], FOR_GOOD) for name, ranks in RANKS.items()),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("deployment", "what", "how"), CASES, indirect=["deployment"])
def test_one_is_harmed(deployment: Deployment, what: str, how: str) -> None:
    """Answers that wait for it go on when it does. Where it is lost, another takes its place; what ran on it is told
    so, and answered when it asks again. A drafter and its ranks cost speculation only."""
    is_lost = how in ("killed", FOR_GOOD)
    with Faulted(deployment) as fault:
        pid = only(deployment, what)
        if how == "killed":
            check_nothing_is_left(kill(deployment, what))
        elif is_lost:
            stop_for_good(deployment, what)
        else:
            fault.hold_up(pid, how)
        fault.whole_again()
    cuts = is_lost and (what in CUTTING or what.startswith("TargetRank"))
    fault.check(cut=cuts, without_status=is_lost and what == PROXY)
    assert (only(deployment, what) != pid) == is_lost
    check_all_is_well(deployment)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [PROXY, INGRESS])
def test_one_is_stopped_for_good(ngram_pair: Deployment, what: str) -> None:
    """What runs on it stands still until it is given up, and is told so then; another takes its place. Of a target
    replica and its rank 0: test_lost_replica.py."""
    before = counted(ngram_pair)
    pid = only(ngram_pair, what)
    lost = family(pid)
    streams = under_way(ngram_pair.client, STREAMS, MOST_TOKENS)
    with stopped(pid):
        began = time.monotonic()
        wait_until(lambda: pid not in processes(ngram_pair).get(what, []), GIVEN_UP_WITHIN_S, "it is given up")
        print(f"{what} given up {time.monotonic() - began:.1f} s after it was stopped")
        told = join(streams)
        print(f"its streams were told by {time.monotonic() - began:.1f} s")
        wait_until_counted(ngram_pair, before, REPLACED_WITHIN_S)
        check_nothing_is_left(lost)
    assert len(told) == STREAMS, "all of them ran on it"
    assert {error.code for error in told} == {
        grpc.StatusCode.CANCELLED if what == PROXY else grpc.StatusCode.UNAVAILABLE
    }
    for each in streams:
        ngram_pair.reference.check(each.prompt, each.tokens, label="until then")
    check_all_is_well(ngram_pair)


@pytest.mark.parametrize("how", ["slowed", "stopped", "stopped for good", "killed"])
def test_a_replica_of_the_pool(pool: Deployment, how: str) -> None:
    """Its drafter is lost with it, and its targets go to another; other harm is not noticed."""
    is_lost = how in ("stopped for good", "killed")
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    replica, pid = next(iter(pool.replicas(POOL_REPLICA).items()))
    drafter = next(each for name, each in pool.drafters().items() if replica in name)
    with Faulted(pool) as fault:
        if not is_lost:
            fault.hold_up(pid, how)
        else:
            lost = [*family(pid), *family(drafter)]
            began = time.monotonic()
            with ExitStack() as for_good:
                if how == "killed":
                    os.kill(pid, signal.SIGKILL)
                else:
                    for_good.enter_context(stopped(pid))
                wait_until(lambda: not alive(lost), GIVEN_UP_WITHIN_S, "it and its drafter are gone")
            print(f"it and its drafter gone after {time.monotonic() - began:.1f} s")
            wait_until(lambda: replica not in pool.replicas(POOL_REPLICA), HANG_GUARD_S, "its end is known")
        fault.whole_again()
        wait_until(lambda: is_even(pool), REPLACED_WITHIN_S, "a drafter each")
    fault.check(cut=False)
    assert (pid in pool.replicas(POOL_REPLICA).values()) != is_lost
    all_draft(pool)
