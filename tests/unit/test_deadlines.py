"""Requests that have run out of time, among those that are still there."""

from __future__ import annotations

import pickle

from outrider.actors.replica_calls import Deadline, GenerationRequest, HttpCall
from outrider.actors.round.scheduling import Deadlines


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


def test_what_travels_is_the_time_left_and_no_clocks_reading() -> None:
    """Another node's clock, of either kind, shows something else; one may be set while the request is on its way."""
    now = 1_000.0
    here = Deadline.after(5.0, clock=lambda: now)
    elsewhere = Deadline.after(5.0, clock=lambda: 77_000.0)
    assert pickle.dumps(here) == pickle.dumps(elsewhere)
    now += 2.0
    assert here.left_s() == 3.0
    restore, left = here.__reduce__()
    assert (restore, left) == (Deadline.after, (3.0,))
    assert restore(*left, clock=lambda: 50.0) == Deadline(53.0)  # type: ignore[call-arg]


def test_both_kinds_of_request_carry_it_to_another_process() -> None:
    deadline = Deadline(1_005.0, clock=lambda: 1_000.0)
    for request in (
        GenerationRequest("r", prompt_text="a", deadline=deadline),
        HttpCall("POST", "/", b"", (), b"", "r", None, deadline=deadline),
    ):
        arrived = pickle.loads(pickle.dumps(request))
        assert request.seconds_left() == 5.0
        assert arrived.deadline.clock is not deadline.clock
        assert arrived.seconds_left() <= 5.0
    assert GenerationRequest("r", prompt_text="a").seconds_left() is None
