"""The interval of a ratio that was measured in turns, and what an ablation prints of it."""

from __future__ import annotations

import pytest

from tests.bench.emulation.paired import in_turns, ratio_of_pairs


def test_the_interval_is_students_of_the_logarithms() -> None:
    # Logarithms of 1.1, 1.0, 1.2: mean 0.09254, deviation 0.09119, half 4.303 * 0.09119 / sqrt(3) = 0.22655.
    found = ratio_of_pairs([110.0, 100.0, 120.0], [100.0, 100.0, 100.0])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.09696, 0.87458, 1.37588), abs=1e-4)


def test_what_both_have_in_common_falls_out() -> None:
    found = ratio_of_pairs([52.0, 104.0, 26.0], [50.0, 100.0, 25.0])
    assert (found.low, found.ratio, found.high) == pytest.approx((1.04, 1.04, 1.04))
    with pytest.raises(ValueError, match="two"):
        ratio_of_pairs([1.0], [1.0])


def test_who_is_asked_first_changes_from_pair_to_pair() -> None:
    asked: list[tuple[str, int]] = []
    found = in_turns(["a", "b"], 3, lambda name, number: asked.append((name, number)) or len(asked))
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
