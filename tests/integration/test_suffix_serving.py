"""A suffix drafter that is served remembers what its replica answered."""

import pytest
import ray

from outrider.cluster.placement import NAMESPACE
from tests.support.cluster.serving import HANG_GUARD_S, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def remembered(deployment):
    """Answers that the drafters of all replicas remember."""
    actors = [ray.get_actor(f"Drafter:{replica}", namespace=NAMESPACE) for replica in deployment.replicas()]
    statuses = ray.get([actor.status.remote() for actor in actors], timeout=HANG_GUARD_S)
    return sum(status["suffix_cached_requests"] for status in statuses)


def test_each_answer_is_remembered_by_its_replicas_drafter(two_replicas):
    assert two_replicas.status().methods == ["suffix"]
    before = remembered(two_replicas)
    for number in range(6):
        two_replicas.client.generate(list(b"%d, please" % number), temperature=0.0, max_tokens=80, ignore_eos=True)
    wait_until(lambda: remembered(two_replicas) >= before + 6, HANG_GUARD_S, "six more answers", every_s=0.5)
