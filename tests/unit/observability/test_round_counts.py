"""What verifier and book count for metrics."""

import pytest

from outrider.actors.round.round import RoundBook, TrackedRequest
from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.link.messages import (
    MAX_NAME_LENGTH,
    Name,
    Open,
    Proposals,
    ProposalStatus,
)


def linked(**options):
    book = RoundBook(**options)
    book.link_up()
    return book


def tracked(book, request_id="a"):
    request = TrackedRequest(request_id, [1, 2, 3], 4)
    book.track(request)
    return request


def answer(book, request, status, base=None):
    book.receive([Proposals(request.handle, len(request.token_ids) if base is None else base, [], status)])


def test_times_fill_a_histogram_each_in_seconds():
    statistics = RoundStatistics()
    statistics.add_times(RoundTimes(period_ms=50.0, target_ms=30.0, draft_ms=10.0, wait_ms=12.0))
    statistics.add_times(RoundTimes(period_ms=70.0, target_ms=30.0, draft_ms=10.0, wait_ms=0.0))
    sums = {part: histogram["sum"] for part, histogram in statistics.histograms().items()}
    assert sums == pytest.approx({"period": 0.12, "target": 0.06, "draft": 0.02, "wait": 0.012})
    assert all(sum(histogram["counts"]) == 2 for histogram in statistics.histograms().values())


def test_wanted_lengths_count_by_request_and_round_as_far_as_the_request_allows():
    book = linked()
    request = tracked(book)
    for wanted in (9, 2, 0):
        book.commit("a", [5], False, wanted, wanted)
    book.commit("a", [5], True, 3, 3)
    book.commit("unknown", [5], False, 3, 3)
    assert request.num_speculative_tokens == 4
    assert book.wanted == {4: 1, 2: 1, 0: 1}


def test_a_request_without_a_link_is_degraded_once():
    book = RoundBook()
    tracked(book)
    for _ in range(3):
        book.commit("a", [5], False, 2, 2)
    assert book.degraded == {"no_link": 1}


@pytest.mark.parametrize("wanted", [0, 2])
def test_who_wants_no_drafts_or_has_ended_is_not(wanted):
    book = RoundBook()
    tracked(book)
    book.commit("a", [5], wanted > 0, wanted, wanted)
    assert book.degraded == {}


def test_late_answers_degrade():
    book = linked()
    request = tracked(book)
    answer(book, request, ProposalStatus.READY)
    book.commit("a", [5], False, 2, 2)
    assert book.give_up_waiting() == ["a"]
    assert book.degraded == {"late": 1}


@pytest.mark.parametrize(
    ("status", "degraded"),
    [
        (ProposalStatus.OUT_OF_KV, {"out_of_kv": 1}),
        (ProposalStatus.LENGTH, {"length": 1}),
        (ProposalStatus.NOT_READY, {}),
    ],
)
def test_refusals_degrade_but_for_a_prefill_that_is_under_way(status, degraded):
    book = linked()
    request = tracked(book)
    book.commit("a", [5], False, 2, 2)
    answer(book, request, status)
    assert book.degraded == degraded
    assert book.refused == {status: 1}


def test_names_go_before_the_request_where_logs_want_them():
    book = linked(names_requests=True)
    tracked(book, "x" * (MAX_NAME_LENGTH + 1))
    name, opened = book.take_outbox()
    assert name == Name(opened.request, "x" * MAX_NAME_LENGTH)
    assert isinstance(opened, Open)
    quiet = linked()
    tracked(quiet)
    assert [type(message) for message in quiet.take_outbox()] == [Open]
