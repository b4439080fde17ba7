"""The cost of a step: learnt from steps, straight unless bent, not misled by stalls."""

import random

import numpy as np
import pytest

from actors.length.step_cost import StepCost


def taught(seconds, sizes, steps=200, requests=1, noise=0.02, cost=None):
    cost = cost or StepCost(512, memory=100)
    numbers = random.Random(3)
    for step in range(steps):
        tokens = sizes[step % len(sizes)]
        cost.observe(requests, tokens, seconds(tokens) * numbers.gauss(1.0, noise))
    return cost


def test_nothing_is_known_at_first():
    assert StepCost(64, memory=100).seconds(1, np.array([1.0, 64.0])).tolist() == [0.0, 0.0]


def test_one_size_of_steps_says_little_about_others_and_they_look_cheap():
    cost = taught(lambda tokens: 0.1, [4], noise=0.0)
    at_4, at_8, at_64 = cost.seconds(1, np.array([4.0, 8.0, 64.0]))
    assert at_4 == pytest.approx(0.1, rel=0.01)
    assert at_4 <= at_8 <= 1.2 * at_4
    assert at_64 < 3 * at_4


@pytest.mark.parametrize("per_token_s", [0.0001, 0.005])
def test_a_straight_line_is_found_between_and_beyond_the_sizes_seen(per_token_s):
    def line(tokens):
        return 0.1 + per_token_s * tokens

    cost = taught(line, [1, 3, 4, 5])
    for tokens in (1, 2, 4, 6, 8):
        assert cost.seconds(1, float(tokens)) == pytest.approx(line(tokens), rel=0.02)


def test_a_bend_is_found():
    def bent(tokens):
        return 0.025 + 0.0005 * max(0, tokens - 64)

    cost = taught(bent, [32, 60, 100, 160], steps=400)
    for tokens in (32, 60, 100, 160):
        assert cost.seconds(1, float(tokens)) == pytest.approx(bent(tokens), rel=0.06)


def test_a_load_that_comes_back_is_known():
    cost = taught(lambda tokens: 0.02 + 0.001 * tokens, [1, 2, 4])
    before = float(cost.seconds(1, 3.0))
    taught(lambda tokens: 0.02 + 0.001 * tokens, [64, 128], steps=2000, requests=64, cost=cost)
    assert cost.seconds(1, 3.0) == pytest.approx(before, rel=0.03)


def test_stalls_count_little_and_a_lasting_change_is_believed():
    cost = taught(lambda tokens: 0.1, [4])
    for _ in range(3):
        cost.observe(1, 4, 5.0)
    assert cost.seconds(1, 4.0) == pytest.approx(0.1, rel=0.1)
    taught(lambda tokens: 0.2, [4], steps=200, cost=cost)
    assert cost.seconds(1, 4.0) == pytest.approx(0.2, rel=0.1)


def test_requests_cost_apart_from_their_tokens():
    cost = StepCost(512, memory=100)
    for step in range(400):
        requests, length = ((4, 1), (4, 4), (16, 1), (16, 4))[step % 4]
        cost.observe(requests, requests * length, 0.02 + 0.001 * requests + 0.0001 * requests * length)
    assert cost.seconds(16, 16.0) - cost.seconds(4, 16.0) == pytest.approx(0.012, rel=0.2)


def test_uneven_steps_cost_more_on_top():
    cost = StepCost(64, memory=100)
    for step in range(400):
        tokens = (8, 20, 30, 40)[step % 4]
        cost.observe(8, tokens, 0.02 + 0.0001 * tokens + 0.004 * (tokens != 40), uneven=tokens != 40)
    assert 0.002 < cost.uneven_s < 0.005
    assert taught(lambda tokens: 0.1, [4]).uneven_s == 0.0


def test_more_tokens_never_look_cheaper():
    cost = taught(lambda tokens: 0.2 - 0.01 * tokens, [1, 4, 8])
    assert (np.diff(cost.seconds(1, np.arange(1.0, 64.0))) >= -1e-12).all()


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 0.1), (4, -0.1), (4, float("nan")), (4, float("inf"))])
def test_no_step_has_such_a_size_or_time(tokens, seconds):
    with pytest.raises(ValueError, match=f"a step of {tokens} tokens"):
        StepCost(64, memory=100).observe(1, tokens, seconds)


@pytest.mark.parametrize("seed", range(20))
def test_below_the_sizes_seen_no_step_is_free(seed):
    cost, numbers = StepCost(2048, memory=100), random.Random(seed)
    for _ in range(200):
        tokens = numbers.choice([64, 128, 320])
        cost.observe(64, tokens, (0.005 + 0.005 * tokens**1.2) * numbers.gauss(1.0, 0.05))
    assert cost.seconds(1, 1.0) > 0
