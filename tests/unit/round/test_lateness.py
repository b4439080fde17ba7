"""Rounds whose answers are late, or never come, and links that break or change."""

import pytest

from outrider.cluster.link import HANG, Received
from outrider.cluster.link.messages import Commit, Open, Proposals, ProposalStatus
from tests.unit.round.scripted_link import PROMPT, Engine, drafting, never_after_ready, silent


def linked(answer, **options):
    """With a request whose drafter has been told of it."""
    engine = Engine(answer, **options)
    engine.begin("a")
    return engine


def test_without_a_link_the_step_goes_on_and_a_new_link_learns_everything():
    engine = linked(None)
    assert engine.step({"a": [8]}) == [[]]
    engine.link = engine.offer(drafting([1]))
    assert engine.step({"a": [9]}) == [[1]]
    assert list(engine.link.sent[0].token_ids) == [*PROMPT, 8]
    assert engine.round.statistics.late_rounds == 0
    assert engine.now == 0.0, "nobody waited"


def test_after_a_late_round_nobody_waits_until_the_drafter_is_heard_again():
    engine = linked(never_after_ready)
    assert engine.step({"a": [8]}) == [[]]
    assert engine.round.statistics.late_rounds == 1
    assert engine.round.metrics()["degraded"] == {"late": 1}
    assert max(engine.link.polls) > 0.0
    engine.link.polls.clear()
    assert engine.step({"a": [9]}) == [[]]
    assert max(engine.link.polls) == 0.0, "a lagging drafter must not stall every round for a deadline"


@pytest.mark.parametrize("frame_s", [0.009, 0.0001], ids=["now and then", "faster than they are read"])
def test_frames_that_answer_nothing_do_not_make_a_round_wait_longer(frame_s):
    engine = linked(never_after_ready, round_deadline_ms=40.0)
    polls = []

    def poll(timeout_s=0.0):
        polls.append(timeout_s)
        assert len(polls) < 1000, "the step is held for ever"
        engine.sleep(frame_s)
        return Received([Proposals(999, 4, [1])])

    step = engine.commit({"a": [8]})
    engine.link.poll = poll
    assert engine.round.take_drafts(step, ["a"]) == [[]]
    assert engine.now == pytest.approx(0.04, abs=frame_s)
    assert engine.round.statistics.late_rounds == 1


def test_speculation_comes_back_when_a_late_drafter_is_heard_again():
    """The answer to an old commit says that the drafter lives: its answer to the current one is worth the wait."""
    engine = linked(never_after_ready, round_deadline_ms=200)
    link = engine.link
    engine.step({"a": [8]})
    handle = link.sent[0].request
    link.arrive(Proposals(handle, 4, [1]))
    polled = link.poll

    def answer_while_waited_for(timeout_s=0.0):
        if timeout_s > 0:
            link.arrive(Proposals(handle, 5, [2]))
        return polled(timeout_s)

    link.poll = answer_while_waited_for
    assert engine.step({"a": [9]}) == [[2]]
    assert engine.round.status()["dropped_proposals"] == 1
    assert engine.round.statistics.late_rounds == 1


def test_a_broken_link_stops_waiting_at_once_and_reopens_on_the_next():
    engine = linked(drafting([1]), round_deadline_ms=20_000)
    link = engine.link
    engine.step({"a": [8]})

    def break_on_poll(timeout_s=0.0):
        link.broken = "connection lost"

    link.poll = break_on_poll
    link._answer = silent
    assert engine.step({"a": [1, 9]}, {"a": [1]}) == [[]]
    assert engine.round.statistics.late_rounds == 0
    assert engine.step({"a": [10]}) == [[]]
    second = engine.offer(drafting([3]))
    assert engine.step({"a": [11]}) == [[3]]
    assert list(second.sent[0].token_ids) == [*PROMPT, 8, 1, 9, 10]


def test_a_link_that_breaks_while_sending_costs_only_the_drafts():
    engine = linked(drafting([1]))
    step = engine.begin()
    engine.link.broken = "connection lost"
    engine.round.commit(step, {"a": [8]})
    assert engine.round.take_drafts(step, ["a"]) == [[]]


def rounds_until_given_up(engine):
    for rounds in range(1000):
        if engine.link.broken is not None:
            return rounds
        engine.step({"a": [8]})
        engine.sleep(0.005)
    raise AssertionError("the link is kept for ever")


def test_a_drafter_that_answers_nothing_for_a_link_deadline_is_given_up():
    engine = linked(never_after_ready, round_deadline_ms=1, link_deadline_ms=50)
    assert rounds_until_given_up(engine) > 1
    assert HANG in engine.link.broken
    assert 0.05 < engine.now < 0.07


def test_one_request_s_lateness_does_not_lose_another_s_drafts():
    def only_first(message):
        if isinstance(message, Open):
            return [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)]
        if isinstance(message, Commit) and message.request == 1:
            return [Proposals(message.request, message.committed_len, [1, 2])]
        return []

    engine = Engine(only_first)
    engine.begin("a", "b")
    assert engine.step({"a": [8], "b": [8]}) == [[1, 2], []]
    assert engine.round.statistics.late_rounds == 1


def test_a_drafter_that_never_says_ready_on_the_second_link_hangs_too():
    """Nothing is waited for before READY, so the silence after a commit has to be enough."""
    engine = linked(silent, link_deadline_ms=50.0, round_deadline_ms=10.0)
    assert rounds_until_given_up(engine) > 1
    assert HANG in engine.link.broken
    assert max(engine.link.polls) == 0.0


def test_a_drafter_that_is_always_late_is_no_hang():
    engine = linked(never_after_ready, round_deadline_ms=1, link_deadline_ms=50)
    for _ in range(50):
        engine.link.arrive(Proposals(engine.link.sent[0].request, len(engine["a"].token_ids), [1]))
        engine.step({"a": [8]})
        engine.sleep(0.005)
    assert engine.round.statistics.late_rounds > 1
    assert engine.now > 5 * 0.05
    assert engine.link.broken is None


def test_silence_with_nobody_waiting_is_no_hang():
    engine = linked(silent, link_deadline_ms=50.0, round_deadline_ms=10.0)
    engine.step({"a": [1]})
    engine.tell(finished=["a"])
    engine.sleep(1.0)
    engine.begin("b")
    engine.step({"b": [1]})
    assert engine.link.broken is None


def test_another_link_takes_the_place_of_one_that_works_between_two_steps_and_no_drafts_are_lost():
    engine = linked(drafting([1, 2]))
    borrowed = engine.link
    step = engine.commit({"a": [8]})
    home = engine.offer(drafting([3]))
    assert engine.round.take_drafts(step, ["a"]) == [[1, 2]], "the round that runs is the borrowed drafter's"
    assert (borrowed.broken, home.sent) == (None, [])
    step = engine.begin(drafts={"a": [1, 2]})
    assert list(home.sent[0].token_ids) == [*PROMPT, 8]
    assert "takes its place" in borrowed.broken
    assert engine.round.take_drafts(step, ["a"]) == [[1, 2]], "still the drafts that the step verifies"
    engine.round.commit(step, {"a": [1, 2, 9]})
    assert engine.round.take_drafts(step, ["a"]) == [[3]]


def test_a_link_that_broke_before_it_was_taken_changes_nothing():
    engine = linked(drafting([1]))
    engine.offer().broken = "connection lost"
    assert engine.step({"a": [8]}) == [[1]]
    assert engine.link.broken is None


def test_a_step_that_was_scheduled_ahead_changes_links_when_its_answers_are_in():
    """It begins while they are on their way: nothing of the round is lost to the change."""
    engine = linked(drafting([1, 2]))
    borrowed = engine.link
    engine.step({"a": [8]})
    engine.commit({"a": [9]})
    home = engine.offer(drafting([3]))
    step = engine.begin()
    assert (borrowed.broken, home.sent) == (None, [])
    assert engine.round.settle(step, ["a"], [4]) == [[1, 2]]
    assert list(home.sent[0].token_ids) == [*PROMPT, 8, 9]
