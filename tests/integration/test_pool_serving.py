"""A target that is drafted for out of a pool, by whichever drafter is there. (In tests/faults/test_pool.py are two
targets, draft models, and load.)"""

from __future__ import annotations

import os
import signal

import pytest

from tests.pools import PROMPT, ask_registry, scraped, shares
from tests.serving import HANG_GUARD_S, Deployment, drafted, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def check_drafts(app: Deployment) -> None:
    answer = drafted(lambda: app.client.generate(PROMPT, temperature=0.0, max_tokens=200))
    app.reference.check(PROMPT, answer.token_ids, label="whoever drafts")


def test_a_drafter_of_the_pool_drafts_and_when_it_dies_the_other_one(lookup_pool: Deployment) -> None:
    wait_until(lambda: shares(lookup_pool) == [0, 1], HANG_GUARD_S, "one of two drafters is linked to")
    check_drafts(lookup_pool)
    ((name, users),) = [each for each in ask_registry(lookup_pool, "drafters").items() if each[1]]
    assert users == list(lookup_pool.replicas())
    before = lookup_pool.linked()
    os.kill(lookup_pool.drafters()[name], signal.SIGKILL)
    lookup_pool.linked(epoch_after=before.epoch)
    check_drafts(lookup_pool)
    wait_until(lambda: shares(lookup_pool) == [0, 1], HANG_GUARD_S, "two drafters again")


def test_its_metrics_tell_drafters_from_targets(lookup_pool: Deployment) -> None:
    drafters, (target,) = set(lookup_pool.replicas("DrafterPool")), lookup_pool.replicas()

    def up() -> set[str]:
        return {labels["replica"] for labels, value in scraped(lookup_pool).of("outrider:drafter_up") if value == 1}

    wait_until(lambda: up() == drafters, HANG_GUARD_S, "each drafter's metrics", every_s=0.5)
    assert len(drafters) == 2
    assert target not in drafters
