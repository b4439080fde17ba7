"""Two targets share a pool of two drafters, which die, are taken away and come back under load."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from tests.pools import all_draft, ask_registry, is_even, load, scraped, shares
from tests.serving import HANG_GUARD_S, Deployment, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACK_WITHIN_S = 300.0
"""A drafter that loads its model anew, while requests run on few cores."""


def test_each_target_has_a_drafter(pool: Deployment) -> None:
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    all_draft(pool)

    def told() -> bool:
        now, drafters = scraped(pool), pool.replicas("DrafterPool")
        return len(drafters) == 2 and all(
            (now.value("outrider:drafter_up", replica=replica), now.sum("outrider:drafter_links", replica=replica))
            == (1, 1)
            for replica in drafters
        )

    wait_until(told, HANG_GUARD_S, "each drafter's metrics: up, and of one target", every_s=0.5)
    now = scraped(pool)
    for replica in pool.replicas():
        assert now.value("outrider:drafter_up", replica=replica) is None, "no drafter is a target's own"


def test_a_drafter_is_killed_and_the_other_drafts_for_both_until_it_is_back(pool: Deployment) -> None:
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    lost, (bereft,) = next(iter(ask_registry(pool, "drafters").items()))
    epoch = ask_registry(pool, "links")[bereft].epoch
    with load(pool):
        os.kill(pool.drafters()[lost], signal.SIGKILL)

        def has_another() -> bool:
            link = ask_registry(pool, "links")[bereft]
            return bool(link.state == "up" and link.epoch > epoch)

        died = time.monotonic()
        wait_until(has_another, HANG_GUARD_S, "a link in place of the lost one")
        print(f"linked again {time.monotonic() - died:.1f} s after the death")
        wait_until(lambda: is_even(pool), BACK_WITHIN_S, "a drafter each, the lost one among them")
    assert lost in ask_registry(pool, "drafters"), "Ray has started it anew, under its name"
    all_draft(pool)


def test_the_pool_is_made_smaller_and_larger_under_load_and_no_target_is_replaced(pool: Deployment) -> None:
    wait_until(lambda: is_even(pool), HANG_GUARD_S, "a drafter each")
    targets = pool.replicas()

    def scale(num_drafters: int) -> None:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        deployment = DeploymentID("DrafterPool", pool.config.serving.app_name)
        ray.get(controller.update_deployment_replicas.remote(deployment, num_drafters), timeout=HANG_GUARD_S)

    try:
        with load(pool):
            all_draft(pool)
            given_up = time.monotonic()
            scale(1)
            wait_until(lambda: shares(pool) == [2], HANG_GUARD_S, "one drafter for both")
            wait_until(lambda: len(pool.drafters()) == 1, HANG_GUARD_S, "the other's process is gone")
            print(f"left and gone {time.monotonic() - given_up:.1f} s after it was given up")
            scale(2)
            wait_until(lambda: is_even(pool), BACK_WITHIN_S, "a drafter each")
    finally:
        scale(2)
    assert pool.replicas() == targets
    all_draft(pool)
