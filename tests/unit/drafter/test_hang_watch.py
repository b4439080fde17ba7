"""When a drafter ends itself: for a step that stands still, not for a slow one, and not for having been stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from outrider.actors.drafter.hang_watch import HangWatch

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
watching = loop.at_work, 0.05, float(sys.argv[1])
threading.Thread(target=end_when_hung, args=watching, daemon=True).start()
threading.Thread(target=loop.run, daemon=True).start()
while not loop.steps:
    time.sleep(0.01)
print("done", flush=True)
"""


def test_work_hangs_that_is_under_way_for_more_ticks_than_allowed():
    watch = HangWatch(patience_ticks=3)
    assert [watch.tick({7, 100 + count}) for count in range(5)] == [False, False, False, False, True]
    assert not any(watch.tick({200 + count // 4}) for count in range(100)), "one step after the other"
    assert not watch.tick(())


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
