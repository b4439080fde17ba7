"""The verifier's book: what is told to the drafter, whose answer counts, whom a round waits for."""

import numpy as np
import pytest

from outrider.actors.round.round import RoundBook, TrackedRequest
from outrider.cluster.link.messages import (
    Close,
    CloseReason,
    Commit,
    DraftSampling,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode

PROMPT = [5, 6, 7]


def request(request_id="a", k=4, **changes):
    return TrackedRequest(request_id, list(PROMPT), k, **changes)


@pytest.fixture
def book():
    book = RoundBook()
    book.link_up()
    return book


def handle_of(messages):
    return next(message.request for message in messages if isinstance(message, Open))


def opened(book, request_id="a", k=4, ready=True):
    """Track a request, hand its Open over, and let the drafter report READY. Returns the handle."""
    book.track(request(request_id, k))
    handle = handle_of(book.take_outbox())
    if ready:
        book.receive([Proposals(handle, len(PROMPT), [], ProposalStatus.READY)])
    return handle


def test_tracking_opens_with_the_request_s_own_settings(book):
    sampling = DraftSampling(Mode.REJECTION, temperature=0.7, top_p=0.9, top_k=3, seed=-5)
    book.track(request(sampling=sampling))
    (message,) = book.take_outbox()
    assert isinstance(message, Open)
    assert (message.prompt_len, message.offset, list(message.token_ids)) == (3, 0, PROMPT)
    assert (message.num_speculative_tokens, message.sampling) == (4, sampling)
    assert book.take_outbox() == [], "the outbox is taken once"


def test_without_a_link_nothing_is_said_and_a_link_opens_with_all_committed_tokens():
    book = RoundBook()
    book.track(request())
    book.commit("a", [8, 9], finished=False, num_wanted=4, num_on_miss=2)
    assert book.take_outbox() == []
    assert not book.awaited()
    book.link_up()
    (message,) = book.take_outbox()
    assert list(message.token_ids) == [*PROMPT, 8, 9]
    assert message.prompt_len == 5


def test_an_open_does_not_alias_the_book_s_tokens(book):
    book.track(request())
    (message,) = book.take_outbox()
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    assert list(message.token_ids) == PROMPT


def test_a_round_waits_only_once_the_drafter_is_ready(book):
    handle = opened(book, ready=False)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    assert book.take_outbox() == [Commit(handle, 3, [8], 4, 2)]
    assert not book.awaited(), "still prefilling: do not wait"
    book.receive([Proposals(handle, 3, [], ProposalStatus.READY)])
    assert book.awaited(), "ready, and a commit is unanswered"
    book.receive([Proposals(handle, 4, [1, 2])])
    assert not book.awaited()
    assert book.take_drafts(["a"]) == [[1, 2]]


def test_ready_without_a_commit_out_waits_for_nothing(book):
    opened(book)
    assert not book.awaited()


def test_drafts_are_capped_at_the_request_s_own_k(book):
    handle = opened(book, k=2)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [1, 2, 3, 4])])
    assert book.take_drafts(["a", "unknown"]) == [[1, 2], []]


def test_a_request_that_sits_a_step_out_keeps_its_drafts_for_the_next(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [1, 2])])
    assert book.take_drafts(["a"]) == [[1, 2]]
    assert book.take_drafts(["a"]) == [[1, 2]], "the scheduler had no room for it"
    book.commit("a", [1], finished=False, num_wanted=4, num_on_miss=2)
    assert book.take_drafts(["a"]) == [[]]


def q(drafts, columns=2, vocab=100):
    ids = np.array([[draft, *range(vocab, vocab + columns - 1)] for draft in drafts], dtype=np.int32)
    probs = np.full(ids.shape, 1 / columns, dtype=np.float32)
    return SparseQ(ids, probs)


def sampled(book, mode=Mode.REJECTION, top_n=2):
    """A request whose drafts are drawn, committed to length 4. Returns its handle."""
    book.track(request(sampling=DraftSampling(mode, temperature=1.0, top_n=top_n)))
    handle = handle_of(book.take_outbox())
    book.receive([Proposals(handle, len(PROMPT), [], ProposalStatus.READY)])
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    return handle


def test_q_stays_with_the_drafts_until_they_are_verified(book):
    handle, drawn = sampled(book), q([1, 2, 3])
    book.receive([Proposals(handle, 4, [1, 2, 3], q=drawn)])
    assert book.take_drafts(["a"]) == [[1, 2, 3]]
    assert book.q_of("a", [1, 2, 3], 4) == (True, drawn)
    assert book.q_of("a", [1], 4) == (True, drawn), "the scheduler may cut the end off"
    book.commit("a", [1, 9], finished=False, num_wanted=4, num_on_miss=2)
    assert book.q_of("a", [1, 2, 3], 4) == (False, None)


def test_a_link_that_breaks_after_drafts_were_handed_out_leaves_their_q(book):
    handle, drawn = sampled(book), q([1, 2])
    book.receive([Proposals(handle, 4, [1, 2], q=drawn)])
    assert book.take_drafts(["a"]) == [[1, 2]]
    book.link_down()
    assert book.q_of("a", [1, 2], 4) == (True, drawn)
    book.link_up()
    assert book.q_of("a", [1, 2], 4) == (True, drawn)


@pytest.mark.parametrize(("drafts", "position"), [([2, 1], 4), ([1, 2, 3], 4), ([1, 2], 5), ([7], 4)])
def test_drafts_that_are_not_the_proposal_are_told_apart(book, drafts, position):
    handle = sampled(book)
    book.receive([Proposals(handle, 4, [1, 2], q=q([1, 2]))])
    assert book.q_of("a", drafts, position) == (False, None)
    assert book.q_of("nobody", [1], 4) == (False, None)


def test_a_q_of_another_width_than_asked_for_costs_the_proposal(book):
    handle = sampled(book, top_n=3)
    book.receive([Proposals(handle, 4, [1, 2], q=q([1, 2], columns=2))])
    assert book.take_drafts(["a"]) == [[]]
    assert book.unusable == 1
    assert not book.awaited()


def test_coupled_and_greedy_drafts_have_no_use_for_a_q(book):
    handle = sampled(book, mode=Mode.COUPLED, top_n=0)
    book.receive([Proposals(handle, 4, [1, 2], q=q([1, 2]))])
    assert book.q_of("a", [1, 2], 4) == (True, None)


def test_a_commit_throws_away_drafts_that_were_not_taken(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [1, 2])])
    book.commit("a", [9], finished=False, num_wanted=4, num_on_miss=2)
    assert book.take_drafts(["a"]) == [[]]


@pytest.mark.parametrize("base", [3, 5])
def test_an_answer_for_another_committed_length_is_dropped_and_the_wait_goes_on(book, base):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, base, [1, 2])])
    assert book.stale == 1
    assert book.awaited(), "the answer to the last commit is still to come"
    assert book.take_drafts(["a"]) == [[]]


def test_late_requests_are_counted_and_a_late_answer_still_counts_until_the_next_commit(book):
    first, _second = opened(book, "a"), opened(book, "b")
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.commit("b", [8], finished=False, num_wanted=4, num_on_miss=2)
    assert book.give_up_waiting() == ["a", "b"]
    assert book.give_up_waiting() == []
    assert not book.awaited()
    book.receive([Proposals(first, 4, [1])])
    assert book.take_drafts(["a", "b"]) == [[1], []]


def test_after_a_late_answer_the_round_waits_for_the_answer_to_the_commit_after_it(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.give_up_waiting()
    book.commit("a", [9], finished=False, num_wanted=4, num_on_miss=2)
    book.give_up_waiting()
    book.receive([Proposals(handle, 4, [1])])
    assert (book.stale, book.awaited()) == (1, True)
    book.receive([Proposals(handle, 5, [2])])
    assert book.take_drafts(["a"]) == [[2]]


def test_a_finishing_commit_is_not_sent_and_not_awaited(book):
    opened(book)
    book.commit("a", [8], finished=True, num_wanted=4, num_on_miss=2)
    assert book.take_outbox() == []
    assert not book.awaited()


def test_an_empty_commit_and_an_unknown_request_change_nothing(book):
    opened(book)
    book.commit("a", [], finished=False, num_wanted=4, num_on_miss=2)
    book.commit("nobody", [1], finished=False, num_wanted=4, num_on_miss=2)
    assert book.take_outbox() == []


@pytest.mark.parametrize("reason", list(CloseReason))
def test_untracking_closes_once_and_an_answer_to_the_closed_handle_finds_nobody(book, reason):
    handle = opened(book)
    book.untrack("a", reason)
    book.untrack("a", reason)
    assert book.take_outbox() == [Close(handle, reason)]
    assert ("a" in book, len(book)) == (False, 0)
    book.receive([Proposals(handle, 4, [1])])
    assert book.stale == 1


def test_a_resumed_request_gets_a_new_handle_so_its_earlier_life_s_answers_are_stale(book):
    first = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.untrack("a", CloseReason.PREEMPTED)
    book.take_outbox()
    book.track(TrackedRequest("a", [*PROMPT, 8], 4))
    second = handle_of(book.take_outbox())
    assert second != first
    book.receive([Proposals(first, 4, [1, 1])])
    assert book.take_drafts(["a"]) == [[]]
    book.receive([Proposals(second, 4, [2])])
    assert book.take_drafts(["a"]) == [[2]]


@pytest.mark.parametrize("status", [ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH])
def test_a_drafter_without_room_is_not_waited_for_until_it_drafts_again(book, status):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [], status)])
    assert not book.awaited()
    assert book.refused == {status: 1}
    book.commit("a", [9], finished=False, num_wanted=4, num_on_miss=2)
    assert not book.awaited()
    book.receive([Proposals(handle, 5, [1])])
    book.commit("a", [1, 2], finished=False, num_wanted=4, num_on_miss=2)
    assert book.awaited()


def test_not_ready_then_ready_waits_for_the_answer_again(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [], ProposalStatus.NOT_READY)])
    assert not book.awaited()
    book.receive([Proposals(handle, 4, [], ProposalStatus.READY)])
    assert book.awaited()


def test_an_unknown_request_is_opened_anew_with_all_its_tokens(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.take_outbox()
    book.receive([Proposals(handle, 3, [], ProposalStatus.UNKNOWN_REQUEST)])
    closed, again = book.take_outbox()
    assert closed == Close(handle, CloseReason.ABORTED)
    assert isinstance(again, Open)
    assert again.request != handle
    assert list(again.token_ids) == [*PROMPT, 8]
    assert not book.awaited()


def test_a_link_that_goes_down_takes_waits_and_unsent_messages_with_it(book):
    handle = opened(book)
    book.commit("a", [8], finished=False, num_wanted=4, num_on_miss=2)
    book.receive([Proposals(handle, 4, [1])])
    book.commit("a", [9], finished=False, num_wanted=4, num_on_miss=2)
    book.link_down()
    assert not book.awaited()
    assert book.take_outbox() == []
    assert book.take_drafts(["a"]) == [[]]
    book.commit("a", [10], finished=False, num_wanted=4, num_on_miss=2)
    book.untrack("nobody", CloseReason.FINISHED)
    assert book.take_outbox() == []
    book.link_up()
    (again,) = book.take_outbox()
    assert list(again.token_ids) == [*PROMPT, 8, 9, 10]
    assert again.request != handle, "a handle is never used twice"


def test_messages_of_the_other_direction_are_ignored(book):
    handle = opened(book)
    book.receive([Commit(handle, 3, [1], 4, 2), Close(handle, CloseReason.FINISHED)])
    assert "a" in book
    assert book.stale == 0
