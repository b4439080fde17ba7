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
        (shifted(0.03, texts=96), NOTHING_LOST, "gain"),
        (shifted(0.1), shifted(-0.04), "forgets"),
        (shifted(0.1), shifted(-0.005, spread=0.001), "forgets"),
        (shifted(0.0), shifted(0.05), "no_gain"),
        (shifted(0.01, spread=0.3), NOTHING_LOST, "no_gain"),
        (shifted(-0.1), NOTHING_LOST, "no_gain"),
        (shifted(0.2, texts=LEAST_TEXTS - 1), NOTHING_LOST, "no_texts"),
        (Difference.of([math.nan] * 20, [0.5] * 20), NOTHING_LOST, "not_finite"),
    ],
)
def test_only_what_is_better_with_confidence_serves(recent, past, reason):
    verdict = judge(recent, past)
    assert (verdict.reason, verdict.adopted) == (reason, reason == "gain")


def test_a_version_that_is_no_better_is_seldom_adopted():
    """One side of 95%."""
    adopted = sum(judge(shifted(0.0, seed=seed), NOTHING_LOST).adopted for seed in range(1000))
    assert 10 < adopted < 90


@pytest.mark.parametrize(
    ("general", "reason"),
    [
        (shifted(-0.05), "forgets"),
        (shifted(-0.01, spread=0.3), "forgets"),
        (shifted(-0.005, spread=0.001), "gain"),
        (shifted(0.1), "gain"),
    ],
)
def test_what_may_have_been_lost_on_general_texts_keeps_a_version_out(general, reason):
    """They are compared with where learning began, so a little of it, time and again, is no loss each time."""
    verdict = judge(shifted(0.1), shifted(0.05), general)
    assert (verdict.reason, verdict.is_bad) == (reason, False)


def test_what_is_no_gain_yet_is_trained_on_however_little_is_certain():
    verdict = judge(shifted(0.0), NOTHING_LOST, general=shifted(0.0, spread=0.3))
    assert (verdict.reason, verdict.is_bad) == ("no_gain", False)
