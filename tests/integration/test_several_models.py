"""Two draft models in one drafter: the tokens are the target's own whichever of them drafts, and each text is led by
the one that can read it."""

import os
import signal

import pytest

from tests.distribution import LIMIT, z_score
from tests.integration.test_equality import CHOICES, PROMPTS, check, check_batch_of_sixteen, options
from tests.integration.test_served_distribution import TOP_K, served  # noqa: F401 - a fixture
from tests.serving import HANG_GUARD_S, LOWER, UPPER

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

READ_BY = {"other": LOWER, "draft_model": UPPER}
"""Letters, by the model that does not take them for others."""

NUM_TOKENS = 320


def change(before, after):
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_the_targets_own_whichever_model_drafts(several_models, name):
    for prompt in PROMPTS:
        check(several_models, prompt, CHOICES[name], f"{name}, two models", must_accept=True)


def test_tokens_are_the_targets_own_where_requests_are_so_many_that_one_model_leads_all(several_models):
    check_batch_of_sixteen(several_models)


@pytest.mark.parametrize("name", ["greedy", "T=1"])
@pytest.mark.parametrize("reader", READ_BY)
def test_each_text_is_led_by_the_model_that_can_read_it(several_models, reader, name):
    """The answers are those without drafts."""
    letters = list(READ_BY[reader])
    asked = options(CHOICES[name], max_tokens=NUM_TOKENS, allowed_token_ids=letters)
    generate = several_models.client.generate
    plain = generate(letters, **asked, speculation=False).token_ids
    before = several_models.drafter_status()
    for _ in range(2):
        assert generate(letters, **asked).token_ids == plain
    after = several_models.drafter_status()
    chosen = change(before["chosen"], after["chosen"])
    right, judged = change(before["right"], after["right"]), change(before["judged"], after["judged"])
    assert chosen[reader] > sum(chosen.values()) / 2, chosen
    for model in READ_BY:  # the one that does not draft is judged too
        assert judged[model] > 0
        assert (right[model] / judged[model] > 0.8) == (model == reader)
    assert set(after["steps_of"]) == set(READ_BY)


@pytest.mark.parametrize("verification", ["rejection", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_answers_are_distributed_as_the_targets_own(several_models, served, verification):  # noqa: F811
    """Fewer of these tokens come from rounds with drafts than with one model that is always waited for: they are so
    often rejected that waiting does not pay."""
    before = several_models.drafter_status()["chosen"]
    answers, p, q, drafted, accepted, _ = served(several_models, verification)
    chosen = change(before, several_models.drafter_status()["chosen"])
    assert all(count > 0 for count in chosen.values()), chosen
    assert drafted > accepted > 100
    assert z_score(answers, p, q, TOP_K) < LIMIT


def test_a_drafter_that_is_killed_costs_no_token(several_models):
    epoch = several_models.linked().epoch
    os.kill(several_models.actors()["Drafter"].pid, signal.SIGKILL)
    for prompt in PROMPTS:
        check(several_models, prompt, CHOICES["greedy"], "two models, killed")
    several_models.linked(epoch_after=epoch, within_s=3 * HANG_GUARD_S)
    check(several_models, PROMPTS[-1], CHOICES["greedy"], "two models, back", must_accept=True)
