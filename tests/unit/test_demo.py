"""What ``make demo`` prints of its answers."""

from __future__ import annotations

from outrider.deploy.demo import Answer, comparison


def test_the_comparison_gives_medians_their_ratio_and_the_tokens_of_a_round() -> None:
    ids = tuple(range(12))
    drafted = [Answer(ids, speed, 4) for speed in (10.0, 30.0, 28.0)]
    plain = [Answer(ids, speed, 12) for speed in (14.0, 100.0, 13.0)]
    assert [line.split() for line in comparison(drafted, plain).splitlines()] == [
        ["with", "speculation", "28.0", "tokens/s", "3.00", "tokens", "a", "round"],
        ["without", "14.0", "tokens/s", "1.00", "tokens", "a", "round"],
        ["2.00", "times", "as", "fast", "(medians", "of", "3,", "in", "turns)"],
    ]
