"""When a drafter's cores may be trained on."""

from outrider.actors.learning.idle import FORGOTTEN_S, MOMENT_S, IdleTime
from tests.clock import Clock


def test_all_drafters_have_to_be_idle_for_a_moment():
    clock = Clock(100.0)
    idle = IdleTime(clock)
    assert idle.is_now, "there is none"
    idle.heard("a", MOMENT_S)
    idle.heard("b", MOMENT_S - 0.01)
    assert not idle.is_now
    idle.heard("b", 30.0)
    assert idle.is_now
    idle.heard("a", None)
    assert not idle.is_now


def test_a_drafter_that_is_gone_holds_nobody_up():
    clock = Clock(100.0)
    idle = IdleTime(clock)
    idle.heard("a", None)
    clock.now += FORGOTTEN_S - 0.1
    idle.heard("b", 2.0)
    assert not idle.is_now
    clock.now += 0.2
    assert idle.is_now
    idle.heard("a", None)
    assert not idle.is_now
