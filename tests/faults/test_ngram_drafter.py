"""What may happen to a drafter and its link while requests run: speed is lost, nothing else, and it comes back."""

import os
import signal
import time

import pytest
import ray

from outrider.cluster.link.keeper import HANG
from outrider.v1 import generation_pb2 as pb
from tests.serving import HANG_GUARD_S, drafted, wait_until
from tests.traffic import Traffic, allowance_s

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"to be or not to be, that is the question: to be or not to be")
MAX_TOKENS = 400


class Fault:
    """What the tests have in common: the state before, and the proof that speculation is back."""

    def __init__(self, pair):
        self.pair = pair
        pair.linked()
        drafted(self._ask)  # an ngram drafter finds something here
        self.allowance_s = allowance_s(pair, PROMPT)
        self.before = pair.linked()
        self.reasons = set()
        """Why links ended since, as far as is_back has seen."""

    def _ask(self):
        return self.pair.client.generate(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS)

    def is_noticed(self):
        link = self.pair.status().link
        return link.state != pb.LINK_STATE_UP or link.epoch > self.before.epoch

    def is_back(self):
        link = self.pair.status().link
        if link.state != pb.LINK_STATE_UP or link.epoch > self.before.epoch:
            self.reasons.add(link.last_error)
        return link.state == pb.LINK_STATE_UP and link.epoch > self.before.epoch

    def check_speculation_is_back(self):
        assert self.pair.linked().reconnects > self.before.reconnects
        status = wait_until(self._speculating, HANG_GUARD_S, "speculation")
        answer = drafted(self._ask)
        self.pair.reference.check(PROMPT, answer.token_ids, label="afterwards")
        after = self.pair.status().rounds
        assert after.drafted_rounds > status.rounds.drafted_rounds

    def _speculating(self):
        status = self.pair.status()
        return status if status.speculation_up else None

    def check_gaps(self, traffic):
        deadline_s = self.pair.config.link.round_deadline_ms / 1e3
        assert traffic.longest_gap() < deadline_s + self.allowance_s, "a round waited longer than its deadline"


@pytest.fixture
def fault(ngram_pair):
    return Fault(ngram_pair)


def test_the_drafter_is_killed(ngram_pair, fault):
    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        killed = ngram_pair.signal_drafter(signal.SIGKILL)
        died = time.monotonic()
        wait_until(fault.is_back, HANG_GUARD_S, "a new link after the drafter's death")
        traffic.wait_for_messages(20)
    assert ngram_pair.actors()["Drafter"].pid != killed
    fault.check_speculation_is_back()
    print(f"back {time.monotonic() - died:.1f} s after the death, longest gap {traffic.longest_gap() * 1e3:.0f} ms")
    fault.check_gaps(traffic)


@pytest.mark.exhaustive
def test_the_drafter_is_stopped_for_ten_seconds(ngram_pair, fault):
    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        stopped = ngram_pair.signal_drafter(signal.SIGSTOP)
        try:
            start = time.monotonic()
            wait_until(fault.is_noticed, HANG_GUARD_S, "the link given up")
            # Nothing is heard, and nothing answered, for the same time: either may be seen first.
            last_error = ngram_pair.status().link.last_error
            assert "link deadline" in last_error or HANG in last_error
            answered = len(traffic.answers)
            wait_until(lambda: len(traffic.answers) > answered, HANG_GUARD_S, "plain decoding goes on")
            time.sleep(max(start + 10 - time.monotonic(), 0))
            assert not fault.is_back()
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(fault.is_back, HANG_GUARD_S, "a new link after the drafter went on")
        traffic.wait_for_messages(20)
    assert ngram_pair.actors()["Drafter"].pid == stopped, "it was stopped, not dead"
    fault.check_speculation_is_back()
    print(f"longest gap {traffic.longest_gap() * 1e3:.0f} ms over {len(traffic.answers)} streams")
    fault.check_gaps(traffic)


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(2, id="epoch", marks=pytest.mark.exhaustive),
        pytest.param(19, id="payload"),
        # What notices each of them is shown over real wires in tests/integration/test_link_processes.py; from there on
        # it is the same way back.
        pytest.param(0, id="magic", marks=pytest.mark.exhaustive),
        pytest.param(5, id="length", marks=pytest.mark.exhaustive),
        pytest.param(16, id="first payload word", marks=pytest.mark.exhaustive),
    ],
)
def test_a_frame_is_damaged(ngram_pair, fault, word):
    """One bit of one DATA frame flips on its way out of the live drafter, after the checksum was written."""

    def damage(drafter, word):
        (link,) = drafter._links.values()
        transport = link._transport

        def start_send(buffer):
            if buffer[4] == 1:
                buffer[word] ^= 1 << 6
                del transport.start_send  # the class's own again
            return type(transport).start_send(transport, buffer)

        transport.start_send = start_send

    with Traffic(ngram_pair, PROMPT, MAX_TOKENS) as traffic:
        ray.get(ngram_pair.drafter().__ray_call__.remote(damage, word), timeout=HANG_GUARD_S)
        wait_until(fault.is_back, HANG_GUARD_S, "a new link after a damaged frame")
        traffic.wait_for_messages(20)
    assert any(each.startswith("bad frame: ") for each in fault.reasons), fault.reasons
    fault.check_speculation_is_back()
    fault.check_gaps(traffic)
    print(f"{fault.reasons}, longest gap {traffic.longest_gap() * 1e3:.0f} ms")
