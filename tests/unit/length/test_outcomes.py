"""Hits, misses, and what came of what was asked for."""

import pytest

from actors.length.limits import LengthLimits
from actors.length.origin import Origin
from actors.length.outcomes import Outcomes


def outcomes(*request_ids, **limits):
    book = Outcomes(LengthLimits(max_tokens=4, **limits))
    for request_id in request_ids:
        book.track(request_id)
    return book


def test_hits_are_expected_only_of_a_drafter_that_drafts_ahead():
    assert outcomes("a").hit_rates(["a"])[0] == pytest.approx(0.85)
    assert outcomes("a", draft_ahead=False).hit_rates(["a"])[0] < 0.001


def test_requests_have_rates_of_their_own():
    book = outcomes("good", "bad")
    for _ in range(100):
        book.observe("good", Origin.MAIN_LINE, True, 4, 4)
        book.observe("bad", Origin.MISS, True, 0, 0)
    good, bad = book.hit_rates(["good", "bad"])
    assert good > 0.9
    assert bad < 0.1
    assert book.main_line_share > 0.9


def test_the_first_answer_after_a_pause_says_nothing_about_guesses():
    book = outcomes("a")
    before = book.shares()
    book.observe("a", Origin.MISS, False, 1, 1)
    assert book.shares() == before


def test_answers_that_do_not_come_bring_nothing():
    book = outcomes("a")
    assert book.delivery(["a"])[0] == 1.0
    for _ in range(200):
        book.observe("a", Origin.NONE, True, 4, 0)
    assert book.delivery(["a"])[0] < 0.1
    assert book.hit_rates(["a"])[0] < 0.1


def test_a_hit_longer_than_asked_for_is_cut():
    book = outcomes("a")
    book.observe("a", Origin.SIDE_BRANCH, True, 2, 4)
    assert book.delivery(["a"])[0] == 1.0


def test_untracked_requests_are_forgotten():
    book = outcomes("a")
    book.untrack("a")
    book.untrack("a")
    book.observe("a", Origin.MISS, True, 1, 1)
    assert len(book) == 0
