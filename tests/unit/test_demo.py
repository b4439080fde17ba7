"""What ``make demo`` prints of its answers."""

from __future__ import annotations

from outrider.deploy.demo import Answer, comparison


def answer(ids: list[int], speed: float, rounds: int) -> Answer:
    return Answer(tuple(ids), speed, rounds)


def test_the_comparison_gives_medians_the_ratio_and_that_tokens_are_the_same() -> None:
    ids = list(range(12))
    drafted = [answer(ids, speed, 4) for speed in (10.0, 30.0, 28.0)]
    plain = [answer(ids, speed, 12) for speed in (14.0, 100.0, 13.0)]
    lines = comparison(drafted, drafted, plain).splitlines()
    assert lines[1].split() == ["tokens/s", "28.0", "14.0", "2.00", "times", "as", "fast"]
    assert lines[2].split() == ["tokens", "a", "round", "3.00", "1.00"]
    assert lines[3].split() == ["tokens", "12", "12", "the", "same", "ones,", "each", "time"]
    assert "medians of 3" in lines[4]


def test_a_slow_down_and_other_tokens_are_said() -> None:
    drafted, plain = [answer([1, 2, 3], 9.0, 1)], [answer([1, 2, 4], 10.0, 3)]
    text = comparison(drafted, drafted, plain)
    assert "0.90 times as fast: drafting costs more here than it saves" in text
    assert "NOT the same: 2 different answers" in text
