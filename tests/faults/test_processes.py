"""Every kind of process of a server killed, stopped and slowed under load: what clients see, and what is left of it.

Of other files: a drafter killed and stopped for longer than its link's deadline (test_ngram_drafter.py), a registry
killed (test_registry.py), one target of several lost (test_lost_replica.py), an engine that stands still for good
(tests/security/test_standing_engine.py), a rank of a pipeline stage (tests/integration/test_pipeline.py).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.callers import Clients, Excuse, summary, violations
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
from tests.serving import HANG_GUARD_S, Deployment, drafted, ended_early, wait_until, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

NUM_CLIENTS = 3
PROMPT = list(b"to be or not to be, that is the question: to be or not to be")

REPLACED_WITHIN_S = 300.0
"""A target that loads its model anew, while others use the cores too."""

AFTERMATH_S = 30.0
"""Beyond that everything is there again: connections and routers learn of it one after another."""

MOST_TOKENS = 900
"""Of an answer: beside its prompt there is room for so many."""

STOPPED_S = 3.0
"""Less than the link's deadline, and than any health check's patience: it is nobody's end."""

SHARE = 0.2
"""Of the time in which a slowed process runs."""

CUTTING = {PROXY, INGRESS, VERIFIER, ENGINE_CORE}
"""Who takes with it what runs on it."""


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


def check_all_is_well(deployment: Deployment) -> None:
    """Nothing runs for anybody, and speculation is there."""
    wait_until_idle(deployment, HANG_GUARD_S)
    deployment.linked()
    answer = drafted(lambda: deployment.client.generate(PROMPT, temperature=0.0, max_tokens=200))
    deployment.reference.check(PROMPT, answer.token_ids, label="afterwards")


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
        lost = family(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in processes(ngram_pair).get(what, []), HANG_GUARD_S, "its end is known")
        fault.whole_again()
    fault.check(cut=what in CUTTING, without_status=what == PROXY)
    assert only(ngram_pair, what) != pid
    wait_until(lambda: not alive(lost), HANG_GUARD_S, "nothing beneath it is left")
    check_all_is_well(ngram_pair)


@pytest.mark.parametrize("what", [INGRESS, pytest.param(PROXY, marks=pytest.mark.exhaustive)])
def test_an_answer_whose_way_out_is_killed_is_not_made_to_its_end(ngram_pair: Deployment, what: str) -> None:
    before = counted(ngram_pair)
    with ended_early(ngram_pair, MOST_TOKENS):
        # A token a round: with drafts a quick machine makes nearly all of them before anybody looks who is alive.
        stream = ngram_pair.client.stream(
            PROMPT, temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True, speculation=False
        )
        next(stream)
        os.kill(only(ngram_pair, what), signal.SIGKILL)
        with pytest.raises(OutriderError) as caught:
            list(stream)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        wait_until_counted(ngram_pair, before, REPLACED_WITHIN_S)


@pytest.mark.parametrize("how", ["slowed", "stopped", "killed"])
def test_a_replica_of_the_pool(pool: Deployment, how: str) -> None:
    """Its drafter goes with it, and its targets to another; short of that nobody notices."""
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    replica, pid = next(iter(pool.replicas(POOL_REPLICA).items()))
    drafter = next(each for name, each in pool.drafters().items() if replica in name)
    with Faulted(pool) as fault:
        if how == "slowed":
            with slowed(pid, SHARE):
                fault.clients.wait_for_answers()
        elif how == "stopped":
            with stopped(pid):
                time.sleep(STOPPED_S)
        else:
            lost = [*family(pid), *family(drafter)]
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_until(lambda: not alive(lost), HANG_GUARD_S, "it and its drafter are gone")
            print(f"drafter gone {time.monotonic() - killed:.1f} s after its owner")
            wait_until(lambda: replica not in pool.replicas(POOL_REPLICA), HANG_GUARD_S, "its end is known")
        fault.whole_again()
        wait_until(lambda: is_even(pool), REPLACED_WITHIN_S, "a drafter each")
    fault.check(cut=False)
    assert (pid in pool.replicas(POOL_REPLICA).values()) == (how != "killed")
    all_draft(pool)
