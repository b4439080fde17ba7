"""What is over of a training whose minutes include generating text, and the rate of learning by it."""

import pytest

from outrider.actors.learning.train import WARM_UP, rate_at
from outrider.deploy.distill import run
from outrider.deploy.distill.run import Clock


def test_the_training_is_what_the_text_leaves_of_the_minutes(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now)
    clock = Clock(before_s=30.0, budget_s=100.0, steps=None, text_s=20.0)
    assert clock.done(7) == pytest.approx(10 / 80)
    now = 1030.0
    clock.text_s += 30.0  # all of it was text
    assert clock.done(7) == pytest.approx(10 / 50)
    now = 1070.0
    assert clock.done(7) == 1.0
    now = 1090.0
    assert clock.done(7) == 1.0


@pytest.mark.parametrize(
    ("before_s", "text_s", "until_s"),
    [
        (0.0, 0.0, 40.0),  # the first run
        (50.0, 30.0, 60.0),  # what is left of the share
        (50.0, 40.0, 50.0),  # nothing is
        (90.0, 0.0, 94.0),  # no more than the share of what is left
        (120.0, 0.0, 120.0),
    ],
)
def test_text_takes_its_share_of_all_runs_together(monkeypatch, before_s, text_s, until_s):
    monkeypatch.setattr(run.time, "monotonic", lambda: 7.0)
    assert Clock(before_s, 100.0, None, text_s).text_until_s() == pytest.approx(until_s)


def test_a_training_by_steps_does_not_look_at_the_clock():
    clock = Clock(before_s=1e9, budget_s=None, steps=40)
    assert [clock.done(step) for step in (0, 10, 40)] == [0.0, 0.25, 1.0]
    assert clock.text_until_s() is None


def test_the_rate_rises_and_falls():
    rates = [rate_at(step / 100) for step in range(101)]
    top = round(WARM_UP * 100)
    assert rates[top] == pytest.approx(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < rates[1]
    assert rates[-1] == pytest.approx(0.05)
