"""When a drafter ends itself: for a step that stands still, not for a slow one, and not for having been stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from outrider.actors.drafter.hang_watch import STEP, SWAP, SWAP_PATIENCE_S, HangWatch

TICK_S = 0.25
PROCESS = """
import sys, threading, time
from outrider.actors.drafter.hang_watch import end_when_hung
from outrider.actors.drafter.loop import DraftLoop
from tests.unit.drafter.scripted_proposer import FakeProposer

class Proposer(FakeProposer):
    def __init__(self):
        super().__init__()
        self.due = [self.new_sequence((1, 1))]

    def execute(self):
        print("working", flush=True)
        sys.stdin.readline()

loop = DraftLoop(Proposer())
watching = loop.at_work, lambda: 0.09, 0.05, float(sys.argv[1])
threading.Thread(target=end_when_hung, args=watching, daemon=True).start()
threading.Thread(target=loop.run, daemon=True).start()
while not loop.steps:
    time.sleep(0.01)
print("done", flush=True)
"""


def run_steps(ticks_of_each, link_deadline_s=0.09):
    """Steps that are seen for so many ticks each. Returns the first that is taken for a hang."""
    watch = HangWatch(TICK_S)
    for number, ticks in enumerate(ticks_of_each):
        for _ in range(ticks + 1):
            if watch.tick({STEP: number}, link_deadline_s):
                return number
    return None


def test_honest_steps_longer_than_the_link_s_deadline_are_none():
    """190 ms are seen by one tick, or by two."""
    assert run_steps([0, 1] * 200) is None


def test_with_a_long_deadline_a_step_has_that_much_time():
    assert run_steps([int(2 * 30 / TICK_S)], link_deadline_s=30) is None
    assert run_steps([int(2 * 30 / TICK_S) + 1], link_deadline_s=30) == 0


def test_steps_that_grow_longer_are_measured_by_those_before():
    least = int(5 / TICK_S)
    assert run_steps([least, 3 * least, 8 * least]) is None
    assert run_steps([least, 3 * least, 13 * least]) == 2
    assert run_steps([3 * least]) == 0
    assert run_steps([least, *[0] * 5000, 3 * least]) == 5001, "that was long ago"


def test_a_swap_has_a_limit_of_its_own_and_gives_steps_no_longer_one():
    watch = HangWatch(TICK_S)
    most = int(SWAP_PATIENCE_S / TICK_S)
    reasons = [watch.tick({SWAP: 7}, 0.09) for _ in range(most + 2)]
    assert reasons[:-1] == [None] * (most + 1)
    assert reasons[-1] == "another version of the weights has been loading for over 120 s"
    reasons = [watch.tick({STEP: 8}, 0.09) for _ in range(22)]
    assert reasons[:21] == [None] * 21
    assert reasons[21] == "a step has been running for over 5 s"


def test_links_are_watched_one_by_one():
    watch = HangWatch(TICK_S)
    reasons = [watch.tick({1: 7, 2: 100 + count, STEP: 200 + count}, 0.09) for count in range(22)]
    assert reasons[:21] == [None] * 21
    assert reasons[21] == "messages have been waiting for over 5 s"


@pytest.fixture
def process():
    running = []

    def start(patience_s):
        command = [sys.executable, "-c", PROCESS, str(patience_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "working\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_process_that_was_stopped_in_the_middle_of_a_step_lives(process):
    patience_s = 3.0
    stopped = process(patience_s)
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(1.5 * patience_s)
    stopped.stdin.write("\n")  # the step ends as soon as the process goes on
    stopped.stdin.flush()
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.stdout.readline() == "done\n"


def test_a_process_whose_step_does_not_end_does_not_live(process):
    assert process(0.2).wait(60) == 1
