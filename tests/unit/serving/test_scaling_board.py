"""What front doors and autoscaling tell each other, without Ray."""

from __future__ import annotations

from outrider.actors.serving.scaling_board import FORGET_AFTER_S, Notes, Scaling

SCALING = Scaling(wanted=2, running=1, least=1, most=4, reason="queue")


def test_refusals_of_all_front_doors_are_counted_once() -> None:
    notes = Notes()
    assert notes.look(None, 0) is None, "nobody has said anything"
    notes.tell("a", 0, 0)
    notes.tell("b", 7, 0)
    assert notes.look(None, 1) == 0, "of before it was known"
    notes.tell("a", 3, 1)
    notes.tell("b", 9, 1)
    notes.tell("a", 5, 2)
    assert notes.look(None, 2) == 7
    assert notes.look(None, 3) == 0


def test_front_doors_hear_what_was_decided_last() -> None:
    notes = Notes()
    assert notes.tell("a", 0, 0) is None
    notes.look(SCALING, 1)
    assert notes.tell("a", 0, 2) == SCALING


def test_without_a_front_door_nothing_is_known() -> None:
    notes = Notes()
    notes.tell("a", 0, 0)
    assert notes.look(None, FORGET_AFTER_S - 1) == 0
    assert notes.look(None, FORGET_AFTER_S) is None
    notes.tell("a", 50, FORGET_AFTER_S + 1)
    assert notes.look(None, FORGET_AFTER_S + 2) == 0


def test_a_front_door_that_begins_anew_takes_nothing_back() -> None:
    notes = Notes()
    notes.tell("a", 10, 0)
    notes.tell("a", 2, 1)
    assert notes.look(None, 2) == 0
    notes.tell("a", 3, 3)
    assert notes.look(None, 4) == 1
