"""Times of rounds as metrics have them."""

import pytest

from outrider.actors.round.statistics import RoundStatistics, RoundTimes


def test_times_fill_a_histogram_each_in_seconds():
    statistics = RoundStatistics()
    statistics.add_times(RoundTimes(period_ms=50.0, target_ms=30.0, draft_ms=10.0, wait_ms=12.0))
    statistics.add_times(RoundTimes(period_ms=70.0, target_ms=30.0, draft_ms=10.0, wait_ms=0.0))
    sums = {part: histogram["sum"] for part, histogram in statistics.histograms().items()}
    assert sums == pytest.approx({"period": 0.12, "target": 0.06, "draft": 0.02, "wait": 0.012})
    assert all(sum(histogram["counts"]) == 2 for histogram in statistics.histograms().values())
