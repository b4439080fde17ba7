"""A drafter whose process lives, and whose links beat their hearts, but that answers nothing."""

import os
import signal
import threading
from contextlib import suppress

import grpc
import pytest
import ray

from outrider.cluster.link import HANG
from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.serving import HANG_GUARD_S, drafted, wait_until
from tests.traffic import Traffic

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"round and round and round and round and round it goes")


def hang(drafter):
    """Runs in the drafter's process: its next answer never comes, and for now its watchdog lets it be."""
    drafter._strategy.commit = lambda key, commit: threading.Event().wait()
    drafter._longest_deadline_s = 1e6


def watch_again(drafter):
    drafter._longest_deadline_s = 0.0


def test_it_loses_its_link_then_its_process(ngram_pair):
    before = ngram_pair.linked()
    pid, drafter = ngram_pair.actors()["Drafter"].pid, ngram_pair.drafter()
    with Traffic(ngram_pair, PROMPT, max_tokens=300) as traffic:
        ray.get(drafter.__ray_call__.remote(hang), timeout=HANG_GUARD_S)
        # The wire notices that nobody reads, and the verifier that nobody answers; either may be first.
        wait_until(lambda: _given_up(ngram_pair, before.epoch), HANG_GUARD_S, "the hang noticed")
        with suppress(ray.exceptions.RayError):  # the keeper of the link may have ended it by now
            ray.get(drafter.__ray_call__.remote(watch_again), timeout=HANG_GUARD_S)
        wait_until(lambda: _other_pid(ngram_pair, pid), HANG_GUARD_S, "the drafter restarted")
        wait_until(lambda: _is_up(ngram_pair, before.epoch), HANG_GUARD_S, "a new link")
        traffic.wait_for_messages(20)
    drafted(lambda: ngram_pair.client.generate(PROMPT, temperature=0.0, max_tokens=300))


@pytest.mark.exhaustive
def test_its_loop_raises(ngram_pair):
    """An exception ends the process, not silently the loop: Ray starts a new one."""

    def poison(drafter):
        def fail(key, commit):
            raise RuntimeError("poisoned by a test")

        drafter._strategy.commit = fail

    before = ngram_pair.linked()
    pid = ngram_pair.actors()["Drafter"].pid
    with Traffic(ngram_pair, PROMPT, max_tokens=300) as traffic:
        with suppress(ray.exceptions.RayError):  # the poison may take effect before the call has answered
            ray.get(ngram_pair.drafter().__ray_call__.remote(poison), timeout=HANG_GUARD_S)
        wait_until(lambda: _other_pid(ngram_pair, pid), HANG_GUARD_S, "the drafter restarted")
        wait_until(lambda: _is_up(ngram_pair, before.epoch), HANG_GUARD_S, "a new link")
        traffic.wait_for_messages(20)


# How a lost replica is replaced, and who is told, is in test_lost_replica.py; that an engine that is dead makes its
# replica one of these, in tests/integration/ingress (test_health_is_that_of_the_target).
@pytest.mark.exhaustive
def test_a_rank_of_the_target_dies(ngram_pair):
    """The replica is replaced; what ran gets UNAVAILABLE, and a retry is served."""
    verifier = ngram_pair.actors()["Verifier"].pid
    stream = ngram_pair.client.stream(PROMPT, temperature=0.0, max_tokens=900, ignore_eos=True)
    next(stream)
    os.kill(verifier, signal.SIGKILL)
    with pytest.raises(OutriderError) as caught:
        list(stream)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE

    def served():
        try:
            return ngram_pair.client.generate(PROMPT, temperature=0.0, max_tokens=20).token_ids
        except OutriderError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    answer = wait_until(served, 3 * HANG_GUARD_S, "the replica replaced", every_s=1.0)
    ngram_pair.reference.check(PROMPT, answer, label="from the new replica")


def _other_pid(deployment, pid):
    drafter = deployment.actors().get("Drafter")
    return drafter is not None and drafter.pid != pid


def _given_up(deployment, epoch):
    link = deployment.status().link
    reason = "link deadline" in link.last_error or HANG in link.last_error
    return reason and (link.epoch > epoch or link.state != pb.LINK_STATE_UP)


def _is_up(deployment, epoch):
    link = deployment.status().link
    return link.state == pb.LINK_STATE_UP and link.epoch > epoch
