"""What becomes of the turns of a stream that shifts."""

from __future__ import annotations

import pytest

from tests.bench.learning_shift import POINTS, Pair, rounds_a_second, windows
from tests.bench.real_pair import Turn


def turn(rounds: int = 10, seconds: float = 2.0) -> Turn:
    return Turn(256, seconds, {"drafted_rounds": rounds, "drafted": 30, "accepted": 3}, [])


@pytest.mark.parametrize("of_each", [(1, 1), (15, 16, 18), (40,), (100, 3, 57)])
def test_a_point_of_the_plot_is_of_one_domain_and_no_turn_is_left_out(of_each: tuple[int, ...]) -> None:
    pairs = [
        Pair(0.0, f"{number} code", 0, turn(), turn()) for number, count in enumerate(of_each) for _ in range(count)
    ]
    found = windows(pairs)
    assert [pair for window in found for pair in window] == pairs
    assert all(len({pair.domain for pair in window}) == 1 for window in found)
    size = max(len(pairs) // POINTS, 1)
    assert all(len(window) < 2 * size for window in found)
    assert sum(len(window) < size for window in found) == sum(count < size for count in of_each)


def test_rounds_a_second_hang_on_no_acceptance() -> None:
    assert rounds_a_second([turn(10, 2.0), turn(30, 4.0)]) == [5.0, 7.5]
