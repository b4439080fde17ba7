"""Checks rounds whose answers are late or never come, how long a round waits, and links that break or change."""

import pytest

from outrider.actors.round.drafter_client import HANG, RoundDeadline
from outrider.cluster.link import Received
from outrider.cluster.link.messages import Commit, Open, Proposals, ProposalStatus
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, drafting, never_after_ready, silent


def linked(answer, **options):
    """Return an engine with a request whose drafter has been told of it."""
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
            return [Proposals(message.request, len(message.token_ids), [], ProposalStatus.READY)]
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
    assert engine.round.insert_drafts(step, ["a"], [4]) == [[1, 2]]
    assert list(home.sent[0].token_ids) == [*PROMPT, 8, 9]


def after(steps_s, longest_s=1.0, steps=2.0):
    deadline = RoundDeadline(longest_s, steps)
    for step_s in steps_s:
        deadline.observe_step(step_s)
    return deadline


@pytest.mark.parametrize(
    ("steps_s", "steps", "longest_s"),
    [
        ([0.01] * 5, None, 1.0),
        ([], 2.0, 1.0),
        ([0.0, -1.0], 2.0, 1.0),
        ([0.02], 2.0, 0.04),
        ([0.02] * 50, 3.5, 0.07),
        ([0.9] * 50, 2.0, 1.0),
        ([0.02] * 50 + [0.06] * 100, 2.0, 0.12),
        ([0.06] * 50 + [0.02] * 100, 2.0, 0.04),
        ([0.02] * 50 + [30.0], 2.0, 0.0425),
    ],
    ids=["no steps asked for", "none yet", "no time", "one", "many", "the fixed time is the longest", "slower for good",
         "faster for good", "a stall"],
)  # fmt: skip
def test_it_is_so_many_steps_and_never_more_than_the_fixed_time(steps_s, steps, longest_s):
    assert after(steps_s, steps=steps).longest_s == pytest.approx(longest_s, rel=0.02)


def test_what_was_measured_while_warming_up_is_forgotten():
    deadline = after([20.0] * 3, longest_s=60.0)
    deadline.reset()
    assert deadline.longest_s == 60.0
    deadline.observe_step(0.02)
    assert deadline.longest_s == pytest.approx(0.04)


def test_a_round_waits_for_so_many_of_the_target_s_steps():
    """The engine's clock stands still but for waiting: a step is made to take 10 ms between two rounds."""
    engine = Engine(never_after_ready, round_deadline_ms=500.0, round_deadline_steps=2.0)
    engine.begin("a", decodes_only=False)
    waits = []
    for token in range(8, 14):
        engine.now += 0.010
        before = engine.now
        engine.drafter.is_lagging = False
        engine.step({"a": [token]})
        waits.append(engine.now - before)
    assert waits[0] == pytest.approx(0.5), "nothing is measured yet"
    assert waits[-1] == pytest.approx(0.02)


@pytest.fixture
def engine():
    """One request, drafted for by a drafter that always says [1, 2]."""
    engine = Engine(drafting([1, 2]))
    engine.begin("a")
    assert engine.step({"a": [8]}) == [[1, 2]]
    return engine


def opened_with(link):
    return [list(message.token_ids) for message in link.sent if isinstance(message, Open)]


def test_every_running_request_is_opened_with_all_its_text_and_is_plain_until_its_first_answer(engine):
    engine.begin(arrival("b", prompt=[3]), num_requests=2)
    engine.begin(arrival("paused", prompt=[4]))
    engine.tell(preempted=["paused"])
    old, new = engine.link, engine.offer(silent)
    step = engine.begin(drafts={"a": [1, 2]}, num_requests=2)
    assert opened_with(new) == [[*PROMPT, 8], [3]]
    assert "takes its place" in old.broken
    assert engine.choose(step, "a")["a"][0] == [1, 2], "what the old drafter sent is verified all the same"
    engine.round.commit(step, {"a": [1, 2, 9]})
    assert engine.round.take_drafts(step, ["a"]) == [[]]
    assert engine.step({"a": [10]}) == [[]]
    assert engine.now == 0, "nobody waits for a drafter that is still reading"
    followed = [message for message in new.sent if isinstance(message, Commit)]
    assert [(m.base_committed_len, list(m.token_ids), m.num_wanted) for m in followed] == [
        (4, [1, 2, 9], 4), (7, [10], 4),
    ]  # fmt: skip
    new.arrive(Proposals(followed[-1].request, 8, [7]))
    new._answer = drafting([6])
    assert engine.step({"a": [11]}) == [[6]]
    assert engine.drafter.degraded == {}


def test_an_answer_of_the_old_drafter_that_is_still_on_its_way_is_not_taken(engine):
    engine.link._answer = silent
    engine.commit({"a": [1, 2, 9]}, drafts={"a": [1, 2]})
    handle = engine["a"].handle
    engine.drafter.give_up_waiting()
    new = engine.offer(silent)
    engine.begin()
    new.arrive(Proposals(handle, 7, [5]))
    assert engine.round.take_drafts(engine.begin(), ["a"]) == [[]]
    assert engine.drafter.stale == 1


def test_a_new_link_that_breaks_is_followed_by_the_next_one(engine):
    new = engine.offer(silent)
    engine.step({"a": [9]})
    new.broken = "connection lost"
    assert engine.step({"a": [10]}) == [[]]
    assert engine.drafter.epoch == 0
    third = engine.offer(drafting([7]))
    engine.step({"a": [11]})
    assert opened_with(third) == [[*PROMPT, 8, 9, 10]]
    assert engine.step({"a": [12]}) == [[7]]


def test_a_target_that_idles_makes_no_step_and_changes_links_too(engine):
    """Its drafter would count it as one of its targets for as long."""
    old, new = engine.link, engine.offer(silent)
    engine.round.status()
    assert old.broken is None, "while there are requests their steps see to it"
    engine.tell(finished=["a"])
    newest = engine.offer(silent)
    engine.round.status()
    assert "takes its place" in old.broken
    assert "takes its place" in new.broken
    assert newest.broken is None
    engine.begin("b")
    assert opened_with(newest) == [PROMPT]


def test_a_link_that_was_never_taken_is_ended_when_there_is_another():
    engine = Engine(drafting([1]))
    second, third = engine.offer(silent), engine.offer(drafting([7]))
    assert "takes its place" in second.broken
    engine.begin("a")
    assert engine.step({"a": [8]}) == [[7]]
    assert third.broken is None
