"""Two targets and two drafters, real clients, and a fault every few seconds."""

from __future__ import annotations

import os
import random

import pytest

from tests.chaos import Clients, Faults, summary, violations
from tests.pools import all_draft, is_even
from tests.serving import HANG_GUARD_S, Deployment, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

SECONDS = float(os.environ.get("OUTRIDER_CHAOS_S", "90"))
SEED = int(os.environ.get("OUTRIDER_CHAOS_SEED", random.randrange(10**6)))
NUM_CLIENTS = 4
RECOVERED_WITHIN_S = 600.0


def test_whatever_dies_no_token_is_wrong_and_no_answer_is_lost(pool: Deployment) -> None:
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    clients, faults = Clients(pool, NUM_CLIENTS, SEED), Faults(pool, SEED)
    clients.start()
    faults.run(SECONDS)
    ended = clients.stop()
    print(f"seed {SEED}: {summary(clients.calls, faults.done)}")
    assert ended, "a call never ended"
    assert not clients.crashed
    assert faults.done, "nothing happened"
    assert violations(pool, clients.calls, faults.done) == []
    wait_until(pool.all_replicas_are_known, RECOVERED_WITHIN_S, "both targets serve again", every_s=0.5)
    wait_until(lambda: is_even(pool), RECOVERED_WITHIN_S, "a drafter each, after it all", every_s=0.5)
    all_draft(pool)
