"""What becomes of the turns of a stream that shifts."""

from __future__ import annotations

import pytest

from tests.bench.learning_shift import POINTS, Pair, Swap, at, rounds_a_second, said_of_swaps, swaps, table, windows
from tests.bench.real_pair import Turn


def turn(rounds: int = 10, seconds: float = 2.0, without: int = 0) -> Turn:
    counts = {"rounds": rounds + without, "drafted_rounds": rounds, "drafted": 30, "accepted": 3}
    return Turn(256, seconds, counts, ["text"] * 4, [20, 10, 20, 10], [5, 1, 3, 0])


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


def test_rounds_without_drafts_are_told_of_the_turns_in_which_another_version_was_taken() -> None:
    """Of two swaps: the first one costs each of four requests a round, the second one nothing."""
    without = {1: (0, 2), 2: (6, 2), 3: (1, 1), 4: (0, 0)}
    versions = {1: 0, 2: 1, 3: 1, 4: 3}
    pairs = [
        Pair(float(minute), "0 code", versions[minute], turn(without=ours), turn(without=theirs))
        for minute, (ours, theirs) in without.items()
    ]
    assert swaps(pairs) == [Swap(2.0, 1, 1.5, 0.5), Swap(4.0, 3, 0.0, 0.0)]
    with_swap, others, most = said_of_swaps(pairs)
    assert with_swap.endswith("2 turns with another version: learning 0.75, frozen 0.25")
    assert others.endswith("the others: learning 0.12, frozen 0.38")
    assert most.startswith("the most, version 1 at minute 2.0: learning 1.50")
    assert swaps([Pair(0.0, "0 code", 2, turn(), turn())]), "before the first turn it is as it was loaded"
    assert len(said_of_swaps(pairs[:1])) == 2


def test_acceptance_is_told_by_temperature() -> None:
    """Requests of a turn have the temperatures in turns: the first and third one, the second and fourth one."""
    assert at([turn(), turn()], [0.0, 0.7], 0.0) == 0.2
    assert at([turn(), turn()], [0.0, 0.7], 0.7) == 0.05
    *_, all_of_it = table([Pair(0.0, "0 code", 0, turn(), turn())] * 4, ["code"], [0.0, 0.7])
    assert all_of_it.startswith("| code, all | 4 |")
    assert all_of_it.endswith("| 0.200 | 0.200 | 0.050 | 0.050 |")
