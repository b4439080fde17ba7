"""Two targets and two drafters, real clients, and a fault every few seconds."""

from __future__ import annotations

import os

import pytest

from tests.chaos import Clients, Faults, summary, violations
from tests.pools import all_draft, is_even
from tests.serving import Deployment, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

SECONDS = float(os.environ.get("OUTRIDER_CHAOS_S", "120"))
"""A third of it for faults that nobody may notice but by the speed, the rest for all."""

SEED = int(os.environ.get("OUTRIDER_CHAOS_SEED", "1"))
"""Of what is chosen and in which order; when it strikes is the machine's."""

NUM_CLIENTS = 4
RECOVERED_WITHIN_S = 600.0


@pytest.mark.parametrize("cutting", [False, True], ids=["drafters", "everything"])
def test_whatever_dies_no_token_is_wrong_and_no_answer_is_lost(pool: Deployment, cutting: bool) -> None:
    wait_until(lambda: is_even(pool), RECOVERED_WITHIN_S, "a drafter each", every_s=0.5)
    clients, faults = Clients(pool, NUM_CLIENTS, SEED), Faults(pool, SEED, cutting=cutting)
    clients.start()
    try:
        faults.run(SECONDS * (2 if cutting else 1) / 3)
        faults.whole_again(RECOVERED_WITHIN_S)
    finally:
        ended = clients.stop()
    print(f"seed {SEED}: {summary(clients.calls, faults.done)}")
    assert ended, "a call never ended"
    assert not clients.crashed
    assert faults.done, "nothing happened"
    assert violations(pool, clients.calls, faults) == []
    wait_until(lambda: is_even(pool), RECOVERED_WITHIN_S, "a drafter each, after it all", every_s=0.5)
    all_draft(pool)
