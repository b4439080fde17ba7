"""The wait for drafts: the model, and measured waits that override it."""

import numpy as np
import pytest

from actors.length.draft_wait import Answer, DraftWait
from actors.length.origin import Origin

TOKENS = np.arange(5)
D, STEP = 0.04, 0.1


def hits(wait, main_share):
    return wait.curves(D).hit_s(TOKENS, main_share, STEP)


def test_model():
    wait = DraftWait(4)
    assert hits(wait, 1.0) == pytest.approx([0, 0, 0.02, 0.06, 0.10])
    assert hits(wait, 0.0) == pytest.approx([0, 0, 0, 0.02, 0.06])
    assert hits(wait, 0.5) == pytest.approx([0, 0, 0.01, 0.04, 0.08])
    assert wait.curves(D).miss_s == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])


def test_misses_that_take_longer_are_corrected_at_every_length():
    wait = DraftWait(4)
    for _ in range(100):
        wait.observe([Answer(Origin.MISS, 2, 0.16)], D, STEP)
    assert wait.curves(D).miss_s == pytest.approx([0, 0.08, 0.16, 0.24, 0.32], rel=0.1)


def test_hits_that_come_late_are_corrected_on_their_line_only():
    wait = DraftWait(4)
    for _ in range(100):
        wait.observe([Answer(Origin.MAIN_LINE, 1, 0.03)], D, STEP)
    assert hits(wait, 1.0)[1:3] == pytest.approx([0.03, 0.05], rel=0.1)
    assert hits(wait, 0.0) == pytest.approx([0, 0, 0, 0.02, 0.06])


def test_waits_shorter_than_the_model_count_too():
    wait = DraftWait(4)
    for _ in range(100):
        wait.observe([Answer(Origin.MAIN_LINE, 3, 0.0)], D, STEP)
    assert hits(wait, 1.0)[3] == pytest.approx(0.0, abs=0.005)


def test_a_round_is_put_down_to_its_slowest_answer():
    wait = DraftWait(4)
    answers = [Answer(Origin.MAIN_LINE, 2, 0.12), Answer(Origin.MISS, 2, 0.12), Answer(Origin.SIDE_BRANCH, 2, 0.12)]
    for _ in range(100):
        wait.observe(answers, D, STEP)
    assert wait.curves(D).miss_s[2] == pytest.approx(0.12, rel=0.1)
    assert hits(wait, 1.0) == pytest.approx([0, 0, 0.02, 0.06, 0.10])


def test_no_answer_counts_as_a_miss_and_more_tokens_never_wait_less():
    wait = DraftWait(4)
    for _ in range(100):
        wait.observe([Answer(Origin.NONE, 1, 1.0)], D, STEP)
    miss_s = wait.curves(D).miss_s
    assert miss_s[1] > 0.9
    assert (np.diff(miss_s) >= 0).all()


def test_without_answers_nothing_is_learnt():
    wait = DraftWait(4)
    wait.observe([], D, STEP)
    assert hits(wait, 1.0)[2] == pytest.approx(0.02)
