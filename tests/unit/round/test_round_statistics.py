"""Counting rounds: what is drafted, what is accepted, where the time went."""

import pytest

from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.link.messages import DraftOrigin


def test_a_plain_round_counts_as_a_round_and_as_nothing_else():
    statistics = RoundStatistics()
    statistics.count(0, 1)
    snapshot = statistics.snapshot()
    assert {name: value for name, value in snapshot.items() if value} == {"rounds": 1, "mean_acceptance_length": 1.0}


def test_answers_count_by_where_their_drafts_come_from():
    statistics = RoundStatistics()
    origins = DraftOrigin.MAIN_LINE, DraftOrigin.MISS, DraftOrigin.MAIN_LINE, DraftOrigin.SIDE_BRANCH, DraftOrigin.NONE
    for origin, step_us in zip(origins, (0, 2500, 0, 0, 0), strict=True):
        statistics.count_answer(origin, step_us)
    snapshot = statistics.snapshot()
    assert (snapshot["main_line_hits"], snapshot["side_branch_hits"], snapshot["misses"]) == (2, 1, 1)
    assert snapshot["draft_step_ms"] == 2.5


def test_frames_count_when_they_bring_drafts():
    statistics = RoundStatistics()
    statistics.count_frame(2, 300)
    statistics.count_frame(0, 84)  # READY and the like
    snapshot = statistics.snapshot()
    assert (snapshot["proposals"], snapshot["proposal_bytes"]) == (2, 300)


def test_the_bonus_token_is_not_an_accepted_draft():
    statistics = RoundStatistics()
    statistics.count(4, 5)
    statistics.count(4, 1)
    statistics.count(0, 1)
    snapshot = statistics.snapshot()
    assert (snapshot["rounds"], snapshot["drafted_rounds"]) == (3, 2)
    assert (snapshot["drafted"], snapshot["accepted"]) == (8, 4)
    assert snapshot["acceptance_rate"] == pytest.approx(0.5)
    assert snapshot["mean_acceptance_length"] == pytest.approx(3.0)


def test_medians_are_over_the_last_steps_only():
    statistics = RoundStatistics()
    assert "median" not in statistics.snapshot()
    for period_ms in [1000.0] * 600 + [10.0] * 512:
        statistics.add_times(RoundTimes(period_ms, target_ms=6, draft_ms=3, wait_ms=4))
    median = {"period_ms": 10.0, "target_ms": 6, "draft_ms": 3, "wait_ms": 4, "other_ms": 1.0, "samples": 512}
    assert statistics.snapshot()["median"] == pytest.approx(median)
