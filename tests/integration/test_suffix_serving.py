"""Suffix drafters share one memory of answers between all replicas."""

import pytest
import ray

from outrider.cluster.placement import NAMESPACE
from tests.support.cluster.serving import HANG_GUARD_S, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def drafters(deployment):
    """Status of each replica's drafter, by replica."""
    actors = {replica: ray.get_actor(f"Drafter:{replica}", namespace=NAMESPACE) for replica in deployment.replicas()}
    return {name: ray.get(actor.status.remote(), timeout=HANG_GUARD_S) for name, actor in actors.items()}


def pool_failures(deployment):
    return {name: status["suffix_pool_failures"] for name, status in drafters(deployment).items()}


def test_what_one_replica_answers_every_drafter_learns(two_replicas):
    assert two_replicas.status().methods == ["suffix"]
    before = pool_failures(two_replicas)
    for number in range(6):
        two_replicas.client.generate(list(b"%d, please" % number), temperature=0.0, max_tokens=80, ignore_eos=True)

    def all_know_as_much():
        known = {name: status["suffix_cached_requests"] for name, status in drafters(two_replicas).items()}
        return known if len(known) == 2 and len(set(known.values())) == 1 and min(known.values()) >= 6 else None

    wait_until(all_know_as_much, HANG_GUARD_S, "both drafters knowing the same answers", every_s=0.5)
    assert pool_failures(two_replicas) == before
