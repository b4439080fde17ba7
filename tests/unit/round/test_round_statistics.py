"""Counting rounds: what is drafted, what is accepted, where the time went."""

import pytest

from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.link.messages import DraftOrigin


def test_nothing_yet():
    snapshot = RoundStatistics().snapshot()
    assert snapshot["mean_acceptance_length"] == 1.0
    assert snapshot["acceptance_rate"] == 0.0
    assert "median" not in snapshot


def test_plain_rounds_count_as_rounds_and_as_nothing_else():
    statistics = RoundStatistics()
    statistics.count(0, 1)
    assert statistics.snapshot() == {
        "rounds": 1,
        "drafted_rounds": 0,
        "drafted": 0,
        "accepted": 0,
        "mean_acceptance_length": 1.0,
        "acceptance_rate": 0.0,
        "late_rounds": 0,
        "proposals": 0,
        "proposal_bytes": 0,
        "main_line_hits": 0,
        "side_branch_hits": 0,
        "misses": 0,
        "foreseen": 0,
        "draft_step_ms": 0.0,
    }


def test_answers_count_by_where_their_drafts_come_from():
    statistics = RoundStatistics()
    for origin, step_us in (
        (DraftOrigin.MAIN_LINE, 0),
        (DraftOrigin.MISS, 2500),
        (DraftOrigin.MAIN_LINE, 0),
        (DraftOrigin.SIDE_BRANCH, 0),
    ):
        statistics.count_answer(origin, step_us)
    statistics.count_answer(DraftOrigin.NONE, 0)
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


def test_other_is_what_neither_target_nor_drafter_worked():
    assert RoundTimes(period_ms=20, target_ms=12, draft_ms=5, wait_ms=6).other_ms == pytest.approx(3)


def test_medians_are_over_the_last_steps_only():
    statistics = RoundStatistics()
    for period_ms in [1000.0] * 600 + [10.0] * 512:
        statistics.add_times(RoundTimes(period_ms, target_ms=6, draft_ms=3, wait_ms=4))
    assert statistics.snapshot()["median"] == {
        "period_ms": 10.0,
        "target_ms": 6,
        "draft_ms": 3,
        "wait_ms": 4,
        "other_ms": pytest.approx(1.0),
        "samples": 512,
    }
