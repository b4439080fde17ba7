"""What waits for room on a node, or for a drafter to load: since when, how often the log says so, and that Ray's
silence changes nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outrider.actors.observability.metrics import IngressMetrics
from outrider.actors.serve_seam import waiting
from outrider.actors.serving.waiting import SAY_EVERY_S, TO_LOAD, Group, Waiting, WaitingRoom, Waits

NEEDS = {"Target": "3 GPUs", "DrafterPool": "1 GPU"}
A, B, DRAFTER = ("Target", "a"), ("Target", "b"), ("DrafterPool", "d")


def test_who_waits_is_told_with_what_it_needs_the_longest_first() -> None:
    waits = Waits(NEEDS)
    waits.look([B], 10.0)
    waits.look([A, B, DRAFTER, ("Ingress", "i")], 15.0)
    assert waits.now(20.0) == [
        Waiting("Target", "b", "3 GPUs", 10.0),
        Waiting("DrafterPool", "d", "1 GPU", 5.0),
        Waiting("Target", "a", "3 GPUs", 5.0),
    ]
    assert waits.by_deployment(20.0) == {"Target": (2, 10.0), "DrafterPool": (1, 5.0)}
    waits.look([A], 25.0)
    assert waits.by_deployment(30.0) == {"Target": (1, 15.0), "DrafterPool": (0, 0.0)}
    waits.look([A, B], 30.0)
    assert waits.now(31.0)[1].seconds == 1, "who waits again begins anew"


def test_the_log_hears_of_it_when_it_begins_each_minute_and_when_it_ends() -> None:
    waits = Waits(NEEDS)
    said = {now_s: waits.look([A] if now_s < 135 else [], float(now_s)) for now_s in range(0, 150, 5)}
    assert {now_s: lines for now_s, lines in said.items() if lines} == {
        0: ["Target replica a waits for 3 GPUs, for 0 s by now"],
        60: ["Target replica a waits for 3 GPUs, for 60 s by now"],
        120: ["Target replica a waits for 3 GPUs, for 120 s by now"],
        135: ["Target replica a waits no more, after 135 s"],
    }
    assert SAY_EVERY_S == 60


def test_why_a_drafter_does_not_load_is_in_the_log_and_nowhere_else() -> None:
    waits = Waits(NEEDS)
    assert waits.look([A], 0.0, {DRAFTER: "OSError: /models/x"}) == [
        f"DrafterPool replica d waits for {TO_LOAD} (OSError: /models/x), for 0 s by now",
        "Target replica a waits for 3 GPUs, for 0 s by now",
    ]
    assert waits.now(5.0)[0] == Waiting("DrafterPool", "d", TO_LOAD, 5.0)
    assert waits.by_deployment(5.0)["DrafterPool"] == (1, 5.0)
    assert waits.look([A], 7.0) == ["DrafterPool replica d waits no more, after 7 s"]


def test_another_reason_is_told_at_once_and_the_same_again_after_a_while() -> None:
    waits, once = Waits(NEEDS), Waits(NEEDS, again_s=float("inf"))
    for each in (waits, once):
        each.look([], 0.0, {DRAFTER: "OSError"})
        assert each.look([], 5.0, {DRAFTER: "OSError"}) == []
        (line,) = each.look([], 10.0, {DRAFTER: "no memory"})
        assert line == f"DrafterPool replica d waits for {TO_LOAD} (no memory), for 10 s by now"
    assert len(waits.look([], 10.0 + SAY_EVERY_S, {DRAFTER: "no memory"})) == 1
    assert once.look([], 1e6, {DRAFTER: "no memory"}) == []


def test_a_drafter_whose_node_went_waits_for_room_whatever_kept_it_from_loading() -> None:
    """Its replica went with the node; what that had told is the registry's for a minute still."""
    waits = Waits(NEEDS)
    waits.look([], 0.0, {DRAFTER: "OSError"})
    assert waits.look([DRAFTER], 5.0, {DRAFTER: "OSError"}) == ["DrafterPool replica d waits for 1 GPU, for 5 s by now"]
    assert waits.now(6.0) == [Waiting("DrafterPool", "d", "1 GPU", 6.0)]


def test_what_was_known_is_known_until_ray_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, answers = iter((0.0, 10.0)), [[A], ConnectionError("no GCS"), ConnectionError("no GCS"), []]

    def find() -> list[Group]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    room = WaitingRoom(find, NEEDS, clock=clock.__next__)
    with caplog.at_level(logging.WARNING, "ray.serve.outrider.ingress"):
        for _ in range(3):
            asyncio.run(room.look())
    assert [each.seconds for each in room.now()] == [10.0], "of drafters nothing is asked where there is no pool"
    assert caplog.text.count("no GCS") == 1
    assert answers == [[]]


def test_a_registry_that_does_not_answer_hides_nothing() -> None:
    clock, answers = iter((0.0, 5.0, 9.0)), [{DRAFTER: "OSError"}, ConnectionError("no registry")]

    def find_troubles() -> dict[Group, str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    groups: list[Group] = []
    room = WaitingRoom(lambda: groups, NEEDS, clock=clock.__next__, find_troubles=find_troubles)
    asyncio.run(room.look())
    groups.append(A)
    asyncio.run(room.look())
    assert [(each.deployment, each.seconds) for each in room.now()] == [("DrafterPool", 9.0), ("Target", 4.0)]


def test_metrics_say_how_many_and_how_long() -> None:
    metrics = IngressMetrics()
    assert "waiting" not in metrics.text()
    metrics.waiting = lambda: {"Target": (2, 12.5), "DrafterPool": (0, 0.0)}
    text = metrics.text()
    assert 'outrider:replicas_waiting{deployment="Target"} 2' in text
    assert 'outrider:replicas_waiting_seconds{deployment="Target"} 12.5' in text
    assert 'outrider:replicas_waiting{deployment="DrafterPool"} 0' in text


def test_groups_of_the_application_without_a_place_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "SERVE_REPLICA::outrider#Target#a": "PENDING",
        "SERVE_REPLICA::outrider#Target#b": "CREATED",
        "SERVE_REPLICA::outrider#DrafterPool#d": "RESCHEDULING",
        "SERVE_REPLICA::outrider#Target#c": "REMOVED",
        "SERVE_REPLICA::other#Target#e": "PENDING",
        "somebody's": "PENDING",
    }
    table = {str(number): {"name": name, "state": state} for number, (name, state) in enumerate(names.items())}
    monkeypatch.setattr(waiting, "placement_group_table", lambda: table)
    assert waiting.waiting_groups("outrider") == [A, DRAFTER]
