"""Every kind of process of a server killed, stopped and slowed under load: what clients see, and what is left of it.

Of other files: a drafter killed and stopped for longer than its link's deadline (test_ngram_drafter.py), a registry
killed (test_registry.py), one target of several lost (test_lost_replica.py), an engine that stands still for good
(tests/security/test_standing_engine.py), ranks beside a Verifier and a Drafter (test_ranks.py), a rank of a pipeline
stage (tests/integration/test_pipeline.py).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import grpc
import pytest

from tests.faulted import (
    GIVEN_UP_WITHIN_S,
    REPLACED_WITHIN_S,
    SHARE,
    STOPPED_S,
    Faulted,
    check_all_is_well,
    check_nothing_is_left,
    kill,
    only,
)
from tests.pools import all_draft, is_even
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
    alive,
    counted,
    family,
    processes,
    slowed,
    stopped,
    wait_until_counted,
)
from tests.serving import HANG_GUARD_S, Deployment, wait_until
from tests.streams import join, under_way

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

MOST_TOKENS = 900
"""Of an answer: beside its prompt there is room for so many."""

STREAMS = 3

CUTTING = {PROXY, INGRESS, VERIFIER, ENGINE_CORE}
"""Who takes with it what runs on it."""


@pytest.mark.exhaustive  # some of this and of what follows is in test_chaos.py's short while
@pytest.mark.parametrize("what", [PROXY, INGRESS, TARGET, CONTROLLER, REGISTRY, DRAFTER, VERIFIER, ENGINE_CORE])
def test_one_is_slowed(ngram_pair: Deployment, what: str) -> None:
    """Nobody is told of anything, and no answer stands still."""
    with Faulted(ngram_pair) as fault:
        pid = only(ngram_pair, what)
        with slowed(pid, SHARE):
            fault.clients.wait_for_answers()
        fault.whole_again()
    fault.check(cut=False)
    assert only(ngram_pair, what) == pid
    check_all_is_well(ngram_pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [PROXY, INGRESS, TARGET, CONTROLLER, REGISTRY, DRAFTER, VERIFIER, ENGINE_CORE])
def test_one_is_stopped_for_a_while(ngram_pair: Deployment, what: str) -> None:
    """Answers that wait for it go on when it does."""
    with Faulted(ngram_pair) as fault:
        pid = only(ngram_pair, what)
        with stopped(pid):
            time.sleep(STOPPED_S)
        fault.whole_again()
    fault.check(cut=False)
    assert only(ngram_pair, what) == pid
    check_all_is_well(ngram_pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", [CONTROLLER, INGRESS, PROXY, ENGINE_CORE, VERIFIER])
def test_one_is_killed(ngram_pair: Deployment, what: str) -> None:
    """Another takes its place; what ran on it is told so, and answered when it asks again."""
    with Faulted(ngram_pair) as fault:
        pid = only(ngram_pair, what)
        lost = kill(ngram_pair, what)
        fault.whole_again()
    fault.check(cut=what in CUTTING, without_status=what == PROXY)
    assert only(ngram_pair, what) != pid
    check_nothing_is_left(lost)
    check_all_is_well(ngram_pair)


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
    assert {error.code for error in told} == {grpc.StatusCode.UNAVAILABLE}
    for each in streams:
        ngram_pair.reference.check(each.prompt, each.tokens, label="until then")
    check_all_is_well(ngram_pair)


@pytest.mark.parametrize("how", ["slowed", "stopped", "stopped for good", "killed"])
def test_a_replica_of_the_pool(pool: Deployment, how: str) -> None:
    """Its drafter goes with it, and its targets to another; short of that nobody notices."""
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
