"""A pool of drafters goes down to none while nobody asks for anything, and is back when somebody does."""

from __future__ import annotations

import pytest

from tests.support.cluster.pools import PROMPT, ask_registry, scraped
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, Deployments, Models, drafted, engine, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture
def scaled_pool(deployments: Deployments, models: Models) -> Deployment:
    deployments.add(
        "scaled_pool",
        {
            "target": engine(models.target, max_num_seqs=4),
            "drafter": {
                "method": "draft_model",
                **engine(models.drafter),
                "placement": "pool",
                "autoscaling": {"min": 0, "max": 2, "worth": 0, "downscale_delay_s": 8},
            },
            # Without a controller of lengths nobody knows what is gained: whoever works gets a drafter.
            "speculation": {"num_speculative_tokens": 4, "adaptive": False},
            "link": {"link_deadline_ms": 10_000},
        },
    )
    return deployments.use("scaled_pool")


def nobody_is_silent(deployment: Deployment) -> bool:
    found = scraped(deployment)
    up = found.of("outrider:replica_up")
    return found.sum("outrider:replicas_silent") == 0 and [value for _, value in up] == [1.0]


def test_no_drafter_without_work_and_one_with_it(scaled_pool: Deployment) -> None:
    def ask() -> object:
        answer = scaled_pool.client.generate(PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True)
        scaled_pool.reference.check(PROMPT, answer.token_ids, label="whoever drafts")
        return answer

    drafted(ask)
    wait_until(lambda: not scaled_pool.drafters(), HANG_GUARD_S, "no drafter is left")
    wait_until(lambda: ask_registry(scaled_pool, "drafters") == {}, HANG_GUARD_S, "nobody counts on one")
    wait_until(lambda: nobody_is_silent(scaled_pool), HANG_GUARD_S, "it is not missed", every_s=0.5)
    ask()  # it serves without, and on a busy machine may see the next one come
    drafted(ask)
    assert len(scaled_pool.drafters()) == 1, "for one target"
