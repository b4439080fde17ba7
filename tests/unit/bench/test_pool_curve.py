"""The simulation of a shared drafter against what arithmetic allows."""

import pytest

from tests.bench.emulation.measurement import ceiling, sides_of
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.pool_curve import best_rivals, simulate

PROFILE, K = PROFILES["70b-8b"], 4
PLAIN = 1e3 / PROFILE.target.step_ms(1)


@pytest.mark.parametrize("num_targets", [1, 3])
def test_drafts_gain_and_no_more_than_if_every_outcome_were_prepared_for(num_targets):
    text = TEXTS["stated"]
    speed, tokens = simulate(PROFILE, text, num_targets, 1, K, 150)
    most = ceiling(sides_of(PROFILE)["outrider"], PROFILE.target, text, 1, K).covered
    assert 1.5 * PLAIN < speed < 1.1 * most
    assert 1.5 < tokens < text.acceptance_length(K) * 1.1
    assert simulate(PROFILE, text, num_targets, 1, K, 150) == (speed, tokens), "nothing is left to chance"


def test_a_drafter_that_knows_nothing_costs_little():
    speed, tokens = simulate(PROFILE, TEXTS["hopeless"], 1, 1, K, 300)
    assert 0.9 * PLAIN < speed < 1.05 * PLAIN
    assert tokens < 1.05


def test_rivals_have_their_best_k():
    rivals = best_rivals(PROFILE, TEXTS["stated"], 1)
    assert rivals["in-process-tp"][1] > rivals["in-process"][1] > PLAIN
    assert rivals["in-process-tp"][0] > rivals["in-process"][0], "cheaper drafts pay for longer"
