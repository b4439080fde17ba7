"""Requests that have run out of time, among those that are still there."""

from __future__ import annotations

from actors.deadlines import Deadlines


def test_each_passed_deadline_is_given_once_and_in_order() -> None:
    deadlines, held = Deadlines(), {"a", "b", "c"}
    for request_id, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.add(request_id, at, held)
    assert deadlines.passed(0.5, held) == []
    assert deadlines.passed(2.0, held) == ["a", "b"]
    assert deadlines.passed(2.0, held) == []
    assert deadlines.passed(9.0, held) == ["c"]


def test_requests_that_are_over_are_not_given() -> None:
    deadlines = Deadlines()
    deadlines.add("a", 1.0, {"a"})
    assert deadlines.passed(2.0, set()) == []


def test_deadlines_of_requests_that_are_over_are_not_kept() -> None:
    """A client that gives every request a day."""
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(str(number), 86_400.0 + number, {str(number), "0"})
    assert len(deadlines) < 200
    assert deadlines.passed(1e9, {"0"}) == ["0"]
