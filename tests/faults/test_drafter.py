"""A drafter or its link fails while requests run: speed is lost and nothing else, and the drafter comes back.

That every process may be killed, stopped and slowed is in test_processes.py; several drafters of a pool in
test_pool.py.
"""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import ray

from outrider.actors.round.drafter_client import HANG
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import HANG_GUARD_S, PATH_ROUNDS, drafted, wait_until
from tests.support.load.traffic import Traffic, allowance_s

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"to be or not to be, that is the question: to be or not to be")
MAX_TOKENS = 400
BACK_WITHIN_S = 300.0
"""A draft model that loads anew, while requests run on few cores."""

STOPPED_S = 10.0
"""Longer than the link's deadline."""

ONE_OF_EACH_KIND = ["ngram_pair", "pair", "several", "stages", "paths"]
swept = pytest.mark.exhaustive


class Fault:
    """Remembers the link before a fault, and checks that speculation is back after it."""

    def __init__(self, deployment):
        self.deployment = deployment
        deployment.linked()
        drafted(self.ask)  # an ngram drafter finds something here
        self.allowance_s = allowance_s(deployment, PROMPT)
        self.before = deployment.linked()
        self.pid = deployment.actors()["Drafter"].pid

    def ask(self, max_tokens=MAX_TOKENS):
        answer = self.deployment.client.generate(PROMPT, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.deployment.reference.check(PROMPT, answer.token_ids, label="before and after")
        return answer

    def is_noticed(self):
        link = self.deployment.status().link
        return link.state != pb.LINK_STATE_UP or link.epoch > self.before.epoch

    def is_back(self):
        link = self.deployment.status().link
        return link.state == pb.LINK_STATE_UP and link.epoch > self.before.epoch

    def wait_until_back(self, traffic):
        """Wait for a new link and for messages of streams that it serves."""
        wait_until(self.is_back, BACK_WITHIN_S, "a new link")
        traffic.wait_for_messages(20)

    def wait_for_paths(self):
        """Wait for further rounds with several paths, where there may be any."""
        if self.deployment.config.speculation.num_paths > 1:
            before = self.deployment.metric(PATH_ROUNDS)
            wait_until(lambda: self.deployment.metric(PATH_ROUNDS) > before, HANG_GUARD_S, "paths")

    def is_replaced(self):
        drafter = self.deployment.actors().get("Drafter")
        return drafter is not None and drafter.pid != self.pid

    def check(self, traffic, replaced):
        """Check after the streams that the drafter is the same or another one, drafts, and held no round up."""
        assert self.is_replaced() == replaced
        assert self.deployment.linked().reconnects > self.before.reconnects
        wait_until(lambda: self.deployment.status().speculation_up, HANG_GUARD_S, "speculation")
        before = self.deployment.status().rounds
        drafted(self.ask)
        assert self.deployment.status().rounds.drafted_rounds > before.drafted_rounds
        longest, deadline_s = traffic.longest_gap(), self.deployment.config.link.round_deadline_ms / 1e3
        print(f"longest gap {longest * 1e3:.0f} ms over {len(traffic.answers)} streams")
        assert longest < deadline_s + self.allowance_s, "a round waited longer than its deadline"


@pytest.fixture
def fault(ngram_pair):
    return Fault(ngram_pair)


@pytest.mark.parametrize(
    "deployment", ["ngram_pair", *(pytest.param(name, marks=swept) for name in ONE_OF_EACH_KIND[1:])], indirect=True
)
def test_it_is_killed(deployment):
    """Nobody drafts until another process has loaded, and every stream goes on."""
    fault = Fault(deployment)
    with Traffic(deployment, PROMPT, MAX_TOKENS) as traffic:
        fault.wait_for_paths()
        deployment.signal_drafter(signal.SIGKILL)
        if deployment.name == "pair":  # which loads for long enough to see it
            wait_until(lambda: deployment.status().link.state != pb.LINK_STATE_UP, HANG_GUARD_S, "the death is noticed")
            assert fault.ask(64).metrics.speculative_decoding.num_draft_tokens == 0, "nobody drafts"
        fault.wait_until_back(traffic)
        fault.wait_for_paths()
    fault.check(traffic, replaced=True)


@pytest.mark.exhaustive
def test_it_is_stopped_for_longer_than_the_link_s_deadline(ngram_pair, fault):
    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        stopped = ngram_pair.signal_drafter(signal.SIGSTOP)
        try:
            start = time.monotonic()
            wait_until(fault.is_noticed, HANG_GUARD_S, "the link given up")
            check_reason(ngram_pair)
            answered = len(traffic.answers)
            wait_until(lambda: len(traffic.answers) > answered, HANG_GUARD_S, "plain decoding goes on")
            time.sleep(max(start + STOPPED_S - time.monotonic(), 0))
            assert not fault.is_back()
        finally:
            os.kill(stopped, signal.SIGCONT)
        fault.wait_until_back(traffic)
    fault.check(traffic, replaced=False)


def check_reason(deployment):
    """Nothing is received, and nothing answered, for the same time: either may be noticed first."""
    last_error = deployment.status().link.last_error
    assert "link deadline" in last_error or HANG in last_error


def hang(drafter):
    """Runs in the drafter's process: its next answer never comes."""
    drafter._proposer.commit = lambda sequence, commit: threading.Event().wait()


def poison(drafter):
    def fail(sequence, commit):
        raise RuntimeError("poisoned by a test")

    drafter._proposer.commit = fail


@pytest.mark.exhaustive
def test_it_hangs_while_its_process_lives_and_loses_its_link_then_its_process(ngram_pair, fault):
    drafter = ngram_pair.drafter()
    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        ray.get(drafter.__ray_call__.remote(hang), timeout=HANG_GUARD_S)
        wait_until(fault.is_noticed, HANG_GUARD_S, "the hang noticed")
        check_reason(ngram_pair)
        wait_until(fault.is_replaced, HANG_GUARD_S, "the drafter restarted")
        fault.wait_until_back(traffic)
    fault.check(traffic, replaced=True)


@pytest.mark.exhaustive
def test_its_loop_raises(ngram_pair, fault):
    """An exception ends the process, not silently the loop: Ray starts a new one."""
    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        with suppress(ray.exceptions.RayError):  # the poison may take effect before the call has answered
            ray.get(ngram_pair.drafter().__ray_call__.remote(poison), timeout=HANG_GUARD_S)
        wait_until(fault.is_replaced, HANG_GUARD_S, "the drafter restarted")
        fault.wait_until_back(traffic)
    fault.check(traffic, replaced=True)
