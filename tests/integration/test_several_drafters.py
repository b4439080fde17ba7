"""Look-ups beside a draft model: who drafts follows the text. (Tokens: test_equality.py.)"""

import pytest

from tests.integration.test_equality import CHOICES, TEXT, check, options
from tests.integration.test_served_distribution import check as check_distribution
from tests.integration.test_served_distribution import served  # noqa: F401 - a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_model_and_look_ups_draft(several):
    check(several, TEXT * 3, CHOICES["greedy"], "several drafters", must_accept=True)
    for _ in range(2):  # of two letters look-ups find what follows in the answer itself
        several.client.generate(list(TEXT), **options(CHOICES["greedy"]), allowed_token_ids=list(b"ab"))
    status = several.drafter_status()
    assert status["chosen"]["draft_model"] > 0
    assert status["chosen"]["ngram"] + status["chosen"]["suffix"] > 0


def test_answers_are_distributed_as_the_targets_own(several, served):  # noqa: F811
    check_distribution(several, served, "rejection")
    status = several.drafter_status()
    assert status["chosen"]["ngram"] + status["chosen"]["suffix"] > 100
