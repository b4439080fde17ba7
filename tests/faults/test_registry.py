"""The registry dies. A replica makes another, and links go on being granted."""

import signal

import pytest
import ray

from outrider.cluster.placement import NAMESPACE
from outrider.cluster.registry import EXPIRES_S, registry_name
from tests.support.cluster.serving import wait_until

# In every run test_link_keeper.py kills a registry; tests/unit/serving/test_registry_client.py says who makes another.
pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

MADE_ANEW_S = 1.5 * EXPIRES_S
"""A replica tells the registry every 10 s that it is there, and makes another where there is none: a process that
starts. Shorter than HANG_GUARD_S, so that a replica that does not is told of before the runner's own limit."""

REPLACED_WITHIN_S = 300.0
"""A target that waits for the registry until that is replaced, and then loads its model."""

PROMPT = list(b"to be or not to be, that is the question: to be or not to be")


def test_a_replica_makes_another_registry_and_gets_its_links_from_it(ngram_pair):
    name = registry_name(ngram_pair.config.serving.app_name)
    before = ngram_pair.linked()
    lost = ray.get_actor(name, namespace=NAMESPACE)
    ray.kill(lost)

    def another():
        try:
            found = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return False
        return found._actor_id != lost._actor_id

    wait_until(another, MADE_ANEW_S, "another registry, which a replica makes that misses its own")
    # What it was told by nobody but the replica: where the drafter is.
    ngram_pair.signal_drafter(signal.SIGKILL)
    ngram_pair.linked(epoch_after=before.epoch, within_s=MADE_ANEW_S)  # granted by the new registry
    answer = ngram_pair.client.generate(PROMPT, temperature=0.0, max_tokens=400)
    ngram_pair.reference.check(PROMPT, answer.token_ids, label="afterwards")
    assert answer.metrics.speculative_decoding.num_draft_tokens > 0
