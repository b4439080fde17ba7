"""A draft model with look-ups beside it: the tokens are the target's own whoever drafts, and who drafts follows the
text."""

import os
import signal

import pytest

from tests.integration.test_equality import CHOICES, PROMPTS, TEXT, check, options
from tests.integration.test_served_distribution import check as check_distribution
from tests.integration.test_served_distribution import served  # noqa: F401 - a fixture
from tests.serving import HANG_GUARD_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def chosen(deployment):
    """Commits answered, by method."""
    return dict(deployment.drafter_status()["chosen"])


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_the_targets_own_whoever_drafts(several, name):
    before = chosen(several)
    for prompt in [*PROMPTS, TEXT * 3]:
        for _ in range(2):  # the second time others' answers hold it
            check(several, prompt, CHOICES[name], f"{name}, several drafters", must_accept=True)
    after = chosen(several)
    assert sum(after.values()) > sum(before.values()) + 40


def test_each_method_drafts_and_is_judged_sent_or_not(several):
    check(several, TEXT * 3, CHOICES["greedy"], "several drafters", must_accept=True)
    for _ in range(2):  # of two letters look-ups find what follows in the answer itself
        several.client.generate(list(TEXT), **options(CHOICES["greedy"]), allowed_token_ids=list(b"ab"))
    status = several.drafter_status()
    assert status["chosen"]["draft_model"] > 0
    assert status["chosen"]["ngram"] + status["chosen"]["suffix"] > 0
    for method in ("draft_model", "ngram", "suffix"):
        assert 0 < status["right"][method] <= status["judged"][method]


@pytest.mark.parametrize("verification", ["rejection", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_answers_are_distributed_as_the_targets_own(several, served, verification):  # noqa: F811
    check_distribution(several, served, verification)
    status = several.drafter_status()
    assert status["chosen"]["ngram"] + status["chosen"]["suffix"] > 100


def test_a_drafter_that_is_killed_costs_no_token(several):
    epoch = several.linked().epoch
    os.kill(several.actors()["Drafter"].pid, signal.SIGKILL)
    for prompt in PROMPTS:
        check(several, prompt, CHOICES["greedy"], "several drafters, killed")
    several.linked(epoch_after=epoch, within_s=3 * HANG_GUARD_S)
    check(several, TEXT, CHOICES["greedy"], "several drafters, back", must_accept=True)
