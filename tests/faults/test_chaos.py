"""Real clients, and a fault every few seconds: a short while of it on one target and its drafter, a longer one on two
targets that share two drafters."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.support.cluster.pools import all_draft, is_even
from tests.support.cluster.processes import (
    DRAFTER,
    POOL_REPLICA,
    VERIFIER,
    check_flat,
    counted,
    held,
    wait_until_counted,
)
from tests.support.cluster.serving import (
    HANG_GUARD_S,
    PATH_ROUNDS,
    Deployment,
    drafted,
    num_accepted,
    wait_until,
    wait_until_idle,
)
from tests.support.load.callers import DRAWN, Clients, drawn, summary, violations
from tests.support.load.chaos import INGRESS_FAULTS, TARGET_FAULTS, UNNOTICED_FAULTS, Faults, Harm
from tests.support.models.distribution import LIMIT

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(2400)]

LONG_S = 600.0
"""The longer run: a third of it for faults that only cost speed, the rest for all."""

SHORT_S = 60.0
SEED = int(os.environ.get("OUTRIDER_CHAOS_SEED", "1"))
"""Decides which faults are chosen and in which order; when they strike depends on the machine."""

NUM_CLIENTS = 4
LEAST_DRAWN = 200
"""Tokens; fewer say nothing of their distribution."""

RECOVERED_WITHIN_S = 600.0


def survive(
    deployment: Deployment, harms: tuple[Harm, ...], seconds: float, is_whole: Callable[[], bool], *, num_clients: int
) -> None:
    wait_until(is_whole, RECOVERED_WITHIN_S, "all is there", every_s=0.5)
    clients, faults = Clients(deployment, num_clients, SEED), Faults(deployment, SEED, harms)
    there = counted(deployment)
    clients.start()
    try:
        clients.wait_for_answers(2)
        before = held(deployment)
        faults.run(seconds)
        faults.whole_again(RECOVERED_WITHIN_S)
        clients.wait_for_answers()
    finally:
        ended = clients.stop()
    print(f"\nseed {SEED}: {summary(clients.calls)}; faults: {faults}")
    assert ended, "a call never ended"
    assert not clients.crashed
    assert faults.done, "nothing happened"
    assert violations(deployment, clients.calls, faults.excuse()) == []
    for kind in DRAWN:
        tokens, z = drawn(deployment, clients.calls, kind)
        print(f"{kind.name}: {tokens} tokens, z {z:.2f}")
        assert tokens >= LEAST_DRAWN or seconds <= SHORT_S, f"{kind.name}: too few tokens to tell their distribution"
        assert tokens < LEAST_DRAWN or z < LIMIT, f"{kind.name}: not the target's own distribution"
    wait_until(is_whole, RECOVERED_WITHIN_S, "all is there, after it all", every_s=0.5)
    wait_until_counted(deployment, there, RECOVERED_WITHIN_S)
    print(check_flat(deployment, before, HANG_GUARD_S))


def test_a_short_while(ngram_pair: Deployment) -> None:
    """Faults of all but the only target and its engine."""

    def is_whole() -> bool:
        return ngram_pair.all_replicas_are_known() and bool(ngram_pair.linked())

    harms = tuple(harm for harm in UNNOTICED_FAULTS if harm.what != POOL_REPLICA) + INGRESS_FAULTS
    survive(ngram_pair, harms, SHORT_S, is_whole, num_clients=3)
    wait_until_idle(ngram_pair, HANG_GUARD_S)


def test_paths_while_drafters_die_and_clients_leave(paths: Deployment) -> None:
    """With KV for few: requests are preempted. Paths run until the end, and nothing that they held is kept."""
    harms = tuple(harm for harm in UNNOTICED_FAULTS if harm.what in (DRAFTER, VERIFIER))
    preempted, before = paths.status().target.preemptions, paths.metric(PATH_ROUNDS)
    survive(paths, harms, LONG_S, lambda: bool(paths.linked()), num_clients=8)
    wait_until_idle(paths, HANG_GUARD_S)
    assert paths.status().target.preemptions > preempted
    during = paths.metric(PATH_ROUNDS)
    assert during > before + 100
    drafted(lambda: paths.client.generate(list(range(40, 90)), temperature=0.0, max_tokens=200), num_accepted)
    wait_until(lambda: paths.metric(PATH_ROUNDS) > during, HANG_GUARD_S, "paths after it all")


@pytest.mark.parametrize(
    "harms", [UNNOTICED_FAULTS, UNNOTICED_FAULTS + INGRESS_FAULTS + TARGET_FAULTS], ids=["drafters", "everything"]
)
def test_whatever_dies_no_token_is_wrong_and_no_answer_is_lost(pool: Deployment, harms: tuple[Harm, ...]) -> None:
    share = 1 if harms is UNNOTICED_FAULTS else 2
    survive(pool, harms, LONG_S * share / 3, lambda: is_even(pool), num_clients=NUM_CLIENTS)
    all_draft(pool)
