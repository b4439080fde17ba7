"""Acceptance by request and position."""

import numpy as np
import pytest

from actors.length.acceptance import Acceptance
from actors.length.limits import LengthLimits


def acceptance(*request_ids):
    book = Acceptance(LengthLimits(max_tokens=4))
    for request_id in request_ids:
        book.track(request_id)
    return book


def test_before_anything_was_verified():
    assert acceptance("a").survival(["a"])[0] == pytest.approx([0.7, 0.49, 0.343, 0.2401])


def test_a_position_counts_only_if_it_was_reached():
    book = acceptance("a")
    for _ in range(400):
        book.observe("a", 4, 1)  # the first accepted, the second not, the others never looked at
    by_position = book.by_position()
    assert by_position[0] > 0.98
    assert by_position[1] < 0.05
    assert by_position[2] == pytest.approx(by_position[1]), "unknown depths are like the last known"


def test_requests_differ_and_new_ones_are_average():
    book = acceptance("code", "chat", "new")
    for _ in range(100):
        book.observe("code", 4, 4)
        book.observe("chat", 4, 0)
    code, chat, new = book.survival(["code", "chat", "new"])
    assert code[3] > 0.6
    assert chat[0] < 0.2
    assert chat[0] < new[0] < code[0]
    assert (np.diff(code) <= 0).all()


def test_one_unlucky_round_does_not_condemn_a_request():
    book = acceptance("a", "b")
    for _ in range(100):
        book.observe("a", 4, 4)
    book.observe("b", 4, 0)
    assert book.survival(["b"])[0][0] > 0.8


def test_rounds_without_drafts_say_nothing():
    book = acceptance("a")
    book.observe("a", 0, 0)
    assert book.survival(["a"])[0][0] == pytest.approx(0.7)


def test_a_probe_can_revive_what_was_given_up():
    book = acceptance("a")
    for _ in range(2000):
        book.observe("a", 2, 0)
    given_up = book.survival(["a"])[0][0]
    assert given_up < 0.02
    book.begin_probe(["a", "unknown"], nobody_drafts=True)
    assert book.survival(["a"])[0][0] == pytest.approx(given_up, abs=0.02), "only the weight fades"
    for _ in range(3):
        book.observe("a", 2, 2)
    assert book.survival(["a"])[0][0] > 0.2


def test_untracked_requests_are_forgotten():
    book = acceptance("a")
    book.untrack("a")
    book.untrack("a")
    book.observe("a", 4, 4)
    assert len(book) == 0
    assert book.by_position()[0] == pytest.approx(0.7)


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1)])
def test_no_round_accepts_so_many(drafted, accepted):
    with pytest.raises(ValueError, match="accepted"):
        acceptance("a").observe("a", drafted, accepted)
