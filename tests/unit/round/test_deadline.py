"""How long a round waits: a fixed time, or as long as some of the target's steps take."""

import pytest

from outrider.actors.round.drafter_client import RoundDeadline
from tests.unit.round.scripted_link import Engine, never_after_ready


def after(steps_s, longest_s=1.0, steps=2.0):
    deadline = RoundDeadline(longest_s, steps)
    for step_s in steps_s:
        deadline.observe_step(step_s)
    return deadline


@pytest.mark.parametrize(
    ("steps_s", "steps", "longest_s"),
    [
        ([0.01] * 5, None, 1.0),
        ([], 2.0, 1.0),
        ([0.0, -1.0], 2.0, 1.0),
        ([0.02], 2.0, 0.04),
        ([0.02] * 50, 3.5, 0.07),
        ([0.9] * 50, 2.0, 1.0),
        ([0.02] * 50 + [0.06] * 100, 2.0, 0.12),
        ([0.06] * 50 + [0.02] * 100, 2.0, 0.04),
        ([0.02] * 50 + [30.0], 2.0, 0.0425),
    ],
    ids=["no steps asked for", "none yet", "no time", "one", "many", "the fixed time is the longest", "slower for good",
         "faster for good", "a stall"],
)  # fmt: skip
def test_it_is_so_many_steps_and_never_more_than_the_fixed_time(steps_s, steps, longest_s):
    assert after(steps_s, steps=steps).longest_s == pytest.approx(longest_s, rel=0.02)


def test_what_was_measured_while_warming_up_is_forgotten():
    deadline = after([20.0] * 3, longest_s=60.0)
    deadline.reset()
    assert deadline.longest_s == 60.0
    deadline.observe_step(0.02)
    assert deadline.longest_s == pytest.approx(0.04)


def test_a_round_waits_for_so_many_of_the_target_s_steps():
    """The engine's clock stands still but for waiting: a step is made to take 10 ms between two rounds."""
    engine = Engine(never_after_ready, round_deadline_ms=500.0, round_deadline_steps=2.0)
    engine.begin("a")
    waits = []
    for token in range(8, 14):
        engine.now += 0.010
        before = engine.now
        engine.drafter.is_lagging = False
        engine.step({"a": [token]})
        waits.append(engine.now - before)
    assert waits[0] == pytest.approx(0.5), "nothing is measured yet"
    assert waits[-1] == pytest.approx(0.02)
