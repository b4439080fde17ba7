"""Whether a version is better, by texts that it was not trained on."""

import math
import random

import pytest

from outrider.actors.learning.gate import LEAST_TEXTS, Difference, judge


def shifted(by, spread=0.05, texts=40, seed=0):
    chance = random.Random(seed)
    old = [chance.uniform(0.2, 0.8) for _ in range(texts)]
    return Difference.of([value + by + chance.gauss(0, spread) for value in old], old)


NOTHING_LOST = Difference.of([0.5] * 40, [0.5] * 40)


@pytest.mark.parametrize(
    ("recent", "past", "reason"),
    [
        (shifted(0.1), shifted(0.05), "gain"),
        (shifted(0.1), NOTHING_LOST, "gain"),
        (shifted(0.1), shifted(-0.04), "forgets"),
        (shifted(0.1), shifted(-0.005, spread=0.001), "forgets"),
        (shifted(0.0), shifted(0.05), "no_gain"),
        (shifted(0.01, spread=0.3), NOTHING_LOST, "no_gain"),
        (shifted(-0.1), NOTHING_LOST, "no_gain"),
        (shifted(0.2, texts=LEAST_TEXTS - 1), NOTHING_LOST, "no_texts"),
        (Difference.of([math.nan] * 20, [0.5] * 20), NOTHING_LOST, "not_finite"),
    ],
)
def test_only_what_is_better_for_certain_serves(recent, past, reason):
    verdict = judge(recent, past)
    assert (verdict.reason, verdict.adopted) == (reason, reason == "gain")


def test_a_version_that_is_no_better_is_seldom_adopted():
    """One side of 95%."""
    adopted = sum(judge(shifted(0.0, seed=seed), NOTHING_LOST).adopted for seed in range(1000))
    assert 10 < adopted < 90


def test_a_small_gain_on_many_texts_is_seen():
    assert judge(shifted(0.03, texts=96), NOTHING_LOST).adopted


def test_a_loss_is_certain_too():
    assert shifted(-0.1).is_loss
    assert not shifted(-0.1, texts=LEAST_TEXTS - 1).is_loss
    assert not shifted(0.0).is_loss
    assert not Difference.of([], []).is_loss


@pytest.mark.parametrize(
    ("general", "reason"),
    [(shifted(-0.05), "forgets"), (shifted(-0.005, spread=0.001), "gain"), (shifted(0.1), "gain")],
)
def test_what_was_lost_on_general_texts_keeps_a_version_out(general, reason):
    """They are compared with where learning began, so a little of it, time and again, is no loss each time."""
    assert judge(shifted(0.1), shifted(0.05), general).reason == reason
