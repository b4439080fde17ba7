"""Runs on CPU what tests/gpu/engines measures of steps: the way to its numbers, not the numbers."""

import pytest

from tests.support.load.step_times import K, count_graphs, in_replica, measured

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_mixed_lengths_are_fewer_drafts_a_round(pair):
    in_replica(pair, count_graphs)
    even, mixed = (measured(pair, 2, mixed, steps=40) for mixed in (False, True))
    assert mixed["drafts_a_round"] < K - 0.3, "half of the requests have one draft fewer"
    assert mixed["drafts_a_round"] < even["drafts_a_round"] <= K
    assert all(row["period_ms"] >= row["target_ms"] > 0 for row in (even, mixed))
