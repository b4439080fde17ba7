"""A target of two pipeline stages with two ranks each, under a grammar, and when a rank of the first stage dies.

That its tokens are the target's own, with drafts and without, out of KV cache and with the drafter killed, is in
test_equality.py, test_preemption.py and tests/faults/test_drafter.py.
"""

import os
import signal
import threading

import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.integration.test_equality import PROMPTS, TEXT, options
from tests.support.cluster.serving import HANG_GUARD_S, wait_until
from tests.support.models.reference import GREEDY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_grammar_holds_and_its_drafts_do_too(stages):
    answers = {
        speculation: stages.client.generate(
            list(TEXT), temperature=1.0, seed=5, max_tokens=24, regex=r"[a-c]{6}-[0-9]{4}", speculation=speculation
        ).text
        for speculation in (True, False)
    }
    assert answers[True] == answers[False]
    assert len(answers[True]) == 11


def test_a_rank_of_the_first_stage_that_dies_ends_the_replica_and_another_comes(stages):
    """The last: the deployment is not the same afterwards."""
    before = stages.actors()
    errors = []

    def ask():
        try:
            stages.client.generate(list(TEXT), **options(GREEDY, max_tokens=800))
        except OutriderError as error:
            errors.append(error)

    running = threading.Thread(target=ask)
    running.start()
    wait_until(lambda: stages.status().target.running, HANG_GUARD_S, "a running request")
    os.kill(before["TargetRank-1"].pid, signal.SIGKILL)
    running.join(HANG_GUARD_S)
    assert not running.is_alive(), "the request hangs"
    assert errors, "its stage was gone"

    def anew():
        now = stages.actors()
        return now.get("Verifier", before["Verifier"]).pid != before["Verifier"].pid

    wait_until(anew, 2 * HANG_GUARD_S, "another replica", every_s=0.5)

    def answers():
        try:
            return stages.client.generate(list(PROMPTS[0]), **options(GREEDY))
        except OutriderError:
            return None

    answer = wait_until(answers, 2 * HANG_GUARD_S, "an answer", every_s=1.0)
    stages.reference.check(PROMPTS[0], answer.token_ids, label="another replica")
