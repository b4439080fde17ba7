"""How long a round waits: a fixed time, or as long as some of the target's steps take."""

import pytest

from outrider.actors.round.deadline import RoundDeadline
from tests.unit.round.scripted_link import Engine, never_after_ready


def after(steps_s, longest_s=1.0, steps=2.0):
    deadline = RoundDeadline(longest_s, steps)
    for step_s in steps_s:
        deadline.observe_step(step_s)
    return deadline


def test_without_steps_it_is_the_fixed_time():
    assert after([0.01] * 5, steps=None).longest_s == 1.0


def test_until_a_step_is_measured_it_is_the_fixed_time():
    assert after([]).longest_s == 1.0
    assert after([0.0, -1.0]).longest_s == 1.0


def test_then_it_is_so_many_steps_and_never_more_than_the_fixed_time():
    assert after([0.02]).longest_s == pytest.approx(0.04)
    assert after([0.02] * 50, steps=3.5).longest_s == pytest.approx(0.07)
    assert after([0.9] * 50).longest_s == 1.0


def test_a_stall_says_little_and_a_lasting_change_is_followed():
    usual = after([0.02] * 50)
    usual.observe_step(30.0)
    assert usual.longest_s < 0.045
    assert after([0.02] * 50 + [0.06] * 100).longest_s == pytest.approx(0.12, rel=0.02)
    assert after([0.06] * 50 + [0.02] * 100).longest_s == pytest.approx(0.04, rel=0.02)


def test_what_was_measured_while_warming_up_is_forgotten():
    deadline = after([20.0] * 3, longest_s=60.0)
    deadline.forget()
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
        engine.round._lagging = False
        engine.step({"a": [token]})
        waits.append(engine.now - before)
    print(waits)
    assert waits[0] == pytest.approx(0.5), "nothing is measured yet"
    assert waits[-1] == pytest.approx(0.02)
