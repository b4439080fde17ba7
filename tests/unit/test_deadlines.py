"""Deadlines on their way to another process."""

from __future__ import annotations

import pickle

from outrider.actors.replica_calls import Deadline, GenerationRequest, HttpCall


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
