"""What a proxy lets through: all until it is told, then as many at once as it was told."""

from __future__ import annotations

import logging

import pytest

from outrider.actors.serving.gate import Gate, Gates


def entered(gate: Gate, calls: int) -> int:
    return sum(gate.enter() for _ in range(calls))


def test_everything_goes_through_until_the_capacity_is_known() -> None:
    gate = Gate("calls")
    assert entered(gate, 1000) == 1000
    gate.learn("10")
    assert not gate.enter()
    for _ in range(991):
        gate.leave()
    assert gate.enter()
    assert not gate.enter()
    assert gate.refused == 2


@pytest.mark.parametrize("capacity", ["3", b"3"])
def test_as_many_as_there_is_room_for_and_no_more(capacity: str | bytes) -> None:
    gate = Gate("calls")
    gate.learn(capacity)
    assert [gate.enter() for _ in range(5)] == [True, True, True, False, False]
    gate.leave()
    assert [gate.enter() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("nonsense", ["", "0", "-1", "many", "1e3", "³", b"\xff", "1 "])
def test_nonsense_teaches_nothing(nonsense: str | bytes) -> None:
    gate = Gate("calls")
    gate.learn(nonsense)
    assert entered(gate, 100) == 100
    gate.learn("100")
    gate.learn(nonsense)
    assert not gate.enter()


def test_what_was_told_last_counts() -> None:
    gate = Gate("calls")
    gate.learn("1")
    gate.learn("2")
    assert entered(gate, 3) == 2


def test_a_burst_of_refusals_is_one_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gates("grpc").of("app")
    gate.learn("1")
    with caplog.at_level(logging.WARNING, "ray.serve.outrider.proxy"):
        assert entered(gate, 100) == 1
    (record,) = caplog.records
    assert "'app'" in record.getMessage()
    assert "1 in flight" in record.getMessage()


def test_applications_have_gates_of_their_own() -> None:
    gates = Gates("grpc")
    gates.of("a").learn("1")
    assert entered(gates.of("a"), 2) == 1
    assert entered(gates.of("b"), 2) == 2
    assert gates.of("a") is gates.of("a")


def test_refusals_are_told_once() -> None:
    gate = Gate("calls")
    gate.learn("1")
    entered(gate, 4)
    assert [gate.untold(), gate.untold()] == [3, 0]
    gate.enter()
    assert gate.untold() == 1
