"""How `outrider serve` waits for what runs before it takes everything down."""

from __future__ import annotations

import pytest

from outrider.deploy.liveness import drain


class Ingresses:
    """Answers that end one after the other, and a clock."""

    def __init__(self, ends_s: list[float], press_s: float = float("inf")) -> None:
        self.ends_s, self.press_s = ends_s, press_s
        self.now_s = 0.0
        self.asked = 0
        self.said: list[str] = []

    def ask(self) -> int:
        self.asked += 1
        return sum(end > self.now_s for end in self.ends_s)

    def pressed(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        self.now_s += timeout_s
        return self.now_s >= self.press_s

    def drain(self, limit_s: float) -> int:
        return drain(self.ask, limit_s, pressed=self.pressed, say=self.said.append, clock=lambda: self.now_s)


def test_nothing_that_runs_is_no_wait_and_no_word() -> None:
    idle = Ingresses([])
    assert idle.drain(120) == 0
    assert (idle.now_s, idle.asked, idle.said) == (0.0, 1, [])


def test_running_answers_come_to_their_ends_and_are_counted_down() -> None:
    busy = Ingresses([3.2, 7.9, 31.0])
    assert busy.drain(120) == 0
    assert 31.0 <= busy.now_s < 32.0
    assert busy.said[0] == "requests running: 3; waiting 120 s at most, until another signal"
    assert busy.said[1].startswith("requests running: 2; waiting 117 s")
    assert 4 <= len(busy.said) <= 6, "and a word every ten seconds"


def test_what_takes_too_long_is_cut() -> None:
    busy = Ingresses([1.0, 500.0])
    assert busy.drain(10) == 1
    assert busy.now_s == 10.0
    assert busy.said[-1] == "requests ended unfinished: 1"


def test_a_second_signal_cuts_them_at_once() -> None:
    busy = Ingresses([500.0], press_s=2.0)
    assert busy.drain(120) == 1
    assert busy.now_s == 2.0


def test_ingresses_that_are_gone_hold_nothing_up() -> None:
    said: list[str] = []

    def ask() -> int:
        raise ConnectionError("no replica could be asked")

    assert drain(ask, 120, pressed=lambda _: pytest.fail("waited"), say=said.append) == 0
    assert said == ["no ingress says what is running: ConnectionError: no replica could be asked"]
