"""What a verifier does about answers that come late or never, and about links that break."""

import time

import pytest
from tests.unit.target.scripted_link import PROMPT, FakeLink, drafting, make, never_after_ready, step, tracked

from outrider.cluster.link.keeper import HANG
from outrider.cluster.link.messages import CloseReason, Commit, Open, Proposals, ProposalStatus

pytestmark = pytest.mark.timeout(30)


def test_without_a_link_the_step_goes_on_and_a_new_link_learns_everything():
    verifier = make()
    verifier.track(tracked())
    assert step(verifier, {"a": [8]}) == [[]]
    link = FakeLink(drafting([1]))
    verifier.offer_link(link)
    assert step(verifier, {"a": [9]}) == [[1]]
    opened = link.sent[0]
    assert list(opened.token_ids) == [*PROMPT, 8]
    assert verifier.statistics.late_rounds == 0


def test_after_a_late_round_nobody_waits_until_the_drafter_is_heard_again():
    link = FakeLink(never_after_ready)
    verifier = make(link)
    verifier.track(tracked())
    assert step(verifier, {"a": [8]}) == [[]]
    assert verifier.statistics.late_rounds == 1
    assert max(link.polls) > 0.0
    link.polls.clear()
    assert step(verifier, {"a": [9]}) == [[]]
    assert max(link.polls) == 0.0, "a lagging drafter must not stall every round for a deadline"


def test_speculation_comes_back_when_a_late_drafter_is_heard_again():
    """The answer to an old commit says that the drafter lives: its answer to the current one is worth the wait."""
    link = FakeLink(never_after_ready)
    verifier = make(link, round_deadline_ms=200)
    verifier.track(tracked())
    step(verifier, {"a": [8]})
    handle = link.sent[0].request
    link.arrive(Proposals(handle, 4, [1]))
    polled = link.poll

    def answer_while_waited_for(timeout_s=0.0):
        if timeout_s > 0:
            link.arrive(Proposals(handle, 5, [2]))
        return polled(timeout_s)

    link.poll = answer_while_waited_for
    assert step(verifier, {"a": [9]}) == [[2]]
    assert verifier.status()["dropped_proposals"] == 1
    assert verifier.statistics.late_rounds == 1


def test_a_late_answer_is_never_taken_for_the_current_one():
    link = FakeLink(never_after_ready)
    verifier = make(link)
    verifier.track(tracked())
    step(verifier, {"a": [8]})
    link.arrive(Proposals(link.sent[0].request, 4, [1, 2]))
    assert step(verifier, {"a": [9]}) == [[]]


def test_a_broken_link_stops_waiting_at_once_and_reopens_on_the_next():
    link = FakeLink(drafting([1]))
    verifier = make(link, round_deadline_ms=20_000)
    verifier.track(tracked())
    step(verifier, {"a": [8]})

    def break_on_poll(timeout_s=0.0):
        link.broken = "connection lost"

    link.poll = break_on_poll
    link._answer = lambda message: []
    assert step(verifier, {"a": [1, 9]}, {"a": 1}) == [[]]
    assert verifier.statistics.late_rounds == 0
    assert step(verifier, {"a": [10]}) == [[]]
    second = FakeLink(drafting([3]))
    verifier.offer_link(second)
    assert step(verifier, {"a": [11]}) == [[3]]
    assert list(second.sent[0].token_ids) == [*PROMPT, 8, 1, 9, 10]


def test_a_link_that_breaks_while_sending_costs_only_the_drafts():
    link = FakeLink(drafting([1]))
    verifier = make(link)
    verifier.track(tracked())
    link.broken = "connection lost"
    assert step(verifier, {"a": [8]}) == [[]]


def test_a_drafter_that_answers_nothing_for_a_link_deadline_is_given_up():
    link = FakeLink(never_after_ready)
    verifier = make(link, round_deadline_ms=1, link_deadline_ms=50)
    verifier.track(tracked())
    give_up = time.monotonic() + 10
    while link.broken is None:
        assert time.monotonic() < give_up
        step(verifier, {"a": [8]})
        time.sleep(0.005)
    assert HANG in link.broken


def test_one_request_s_lateness_does_not_lose_another_s_drafts():
    def only_first(message):
        if isinstance(message, Open):
            return [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)]
        if isinstance(message, Commit) and message.request == 1:
            return [Proposals(message.request, message.committed_len, [1, 2])]
        return []

    verifier = make(FakeLink(only_first))
    verifier.track(tracked("a"))
    verifier.track(tracked("b"))
    assert step(verifier, {"a": [8], "b": [8]}) == [[1, 2], []]
    assert verifier.statistics.late_rounds == 1


def test_a_drafter_that_never_says_ready_on_the_second_link_hangs_too():
    """Nothing is waited for before READY, so the silence after a commit has to be enough."""
    verifier = make(FakeLink(), link_deadline_ms=30.0, round_deadline_ms=10.0)
    verifier.track(tracked())
    link = verifier._link
    give_up = time.monotonic() + 10
    while link.broken is None:
        assert time.monotonic() < give_up
        verifier.begin_step()
        verifier.end_step({"a": [1]}, {}, ())
        verifier.take_drafts(["a"])
        time.sleep(0.005)
    assert HANG in link.broken


def test_silence_with_nobody_waiting_is_no_hang():
    link = FakeLink()
    verifier = make(link, link_deadline_ms=20.0, round_deadline_ms=10.0)
    verifier.track(tracked())
    verifier.begin_step()
    verifier.end_step({"a": [1]}, {}, ())
    verifier.take_drafts(["a"])
    verifier.untrack("a", CloseReason.FINISHED)
    time.sleep(0.05)
    verifier.begin_step()
    verifier.track(tracked("b"))
    verifier.end_step({"b": [1]}, {}, ())
    verifier.take_drafts(["b"])
    assert link.broken is None


def test_another_link_takes_the_place_of_one_that_works_between_two_steps_and_no_drafts_are_lost():
    borrowed = FakeLink(drafting([1, 2]))
    verifier = make(borrowed)
    verifier.track(tracked())
    verifier.begin_step()
    home = FakeLink(drafting([3]))
    verifier.end_step({"a": [8]}, {}, ())
    verifier.offer_link(home)
    assert verifier.take_drafts(["a"]) == [[1, 2]], "the round that runs is the borrowed drafter's"
    assert (borrowed.broken, home.sent) == (None, [])
    verifier.begin_step()
    assert "takes its place" in borrowed.broken
    assert list(home.sent[0].token_ids) == [*PROMPT, 8]
    assert verifier.take_drafts(["a"]) == [[1, 2]], "still the drafts that the step verifies"
    assert step(verifier, {"a": [1, 2, 9]}, {"a": 2}) == [[3]]


def test_a_link_that_broke_before_it_was_taken_changes_nothing():
    working = FakeLink(drafting([1]))
    verifier = make(working)
    verifier.track(tracked())
    offered = FakeLink()
    offered.broken = "connection lost"
    verifier.offer_link(offered)
    assert step(verifier, {"a": [8]}) == [[1]]
    assert working.broken is None
