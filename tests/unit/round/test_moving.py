"""A request's way from one drafter to another: no round is lost, whatever happens on it."""

import pytest

from outrider.cluster.link.messages import Close, CloseReason, Commit, Open, Proposals, ProposalStatus
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, drafting, silent


def reading_until(is_read):
    """A drafter that is ready when it is told to be, and then drafts [7]."""

    def answer(message):
        if isinstance(message, Commit) and message.num_wanted:
            status = ProposalStatus.OK if is_read else ProposalStatus.NOT_READY
            return [Proposals(message.request, message.committed_len, [7] if is_read else [], status)]
        return []

    return answer


@pytest.fixture
def engine():
    """One request, drafted for by a drafter that always says [1, 2]."""
    engine = Engine(drafting([1, 2]))
    engine.begin("a")
    assert engine.step({"a": [8]}) == [[1, 2]]
    return engine


def moved_to(engine, answer):
    """A link to another drafter, taken over. Returns both."""
    old, new = engine.link, engine.offer(answer)
    assert engine.step({"a": [1, 2, 9]}, drafts={"a": [1, 2]}) == [[1, 2]], "drafted for where it was"
    return old, new


def opened_with(link):
    return [list(message.token_ids) for message in link.sent if isinstance(message, Open)]


def of_kind(link, kind):
    return [message for message in link.sent if isinstance(message, kind)]


def ready(engine, link):
    """The other drafter has read the request's text."""
    (handle,) = {message.request for message in of_kind(link, Open)}
    link.arrive(Proposals(handle, len(PROMPT), [], ProposalStatus.READY))


def test_it_is_drafted_for_where_it_was_until_its_text_has_been_read_where_it_goes(engine):
    is_read = []
    old, new = moved_to(engine, reading_until(is_read))
    assert opened_with(new) == [[*PROMPT, 8]]
    for number in range(3):
        assert engine.step({"a": [1, 2, 20 + number]}, drafts={"a": [1, 2]}) == [[1, 2]]
    followed = of_kind(new, Commit)
    assert [list(each.token_ids) for each in followed] == [[1, 2, 9], [1, 2, 20], [1, 2, 21], [1, 2, 22]]
    assert {(each.num_wanted, each.num_on_miss) for each in followed} == {(4, 2)}, "else nobody reads it in a hurry"
    assert old.broken is None
    is_read.append(True)
    ready(engine, new)
    assert engine.step({"a": [1, 2, 31]}, drafts={"a": [1, 2]}) == [[7]], "said while the target verified"
    assert [each.reason for each in of_kind(old, Close)] == [CloseReason.PREEMPTED]
    assert "takes its place" in old.broken
    asked = of_kind(new, Commit)[-1]
    assert (list(asked.token_ids), asked.num_wanted) == ([1, 2, 31], 4)
    assert asked.base_committed_len == followed[-1].committed_len, "no token is missing in what it was told"
    assert engine.drafter.degraded == {}


def test_who_comes_meanwhile_begins_at_the_new_one(engine):
    old, new = moved_to(engine, silent)
    engine.begin(arrival("b", prompt=[3]))
    assert opened_with(new)[1:] == [[3]]
    assert opened_with(old) == [PROMPT]


def test_one_whose_prompt_is_not_read_yet_begins_anew_at_once():
    engine = Engine(silent)
    engine.begin("a")
    old, new = engine.link, engine.offer(drafting([7]))
    engine.step({"a": [8]})
    assert opened_with(new) == [PROMPT]
    assert "takes its place" in old.broken, "nobody asks there"
    assert engine.step({"a": [9]}) == [[7]]


def test_a_target_that_idles_makes_no_step_and_leaves_the_old_link_too(engine):
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


def test_the_old_link_breaks_on_the_way(engine):
    is_read = []
    old, new = moved_to(engine, reading_until(is_read))
    old.broken = "connection lost"
    assert engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]}) == [[]]
    assert len(opened_with(new)) == 1, "its text is being read there already"
    is_read.append(True)
    ready(engine, new)
    engine.step({"a": [21]})
    assert engine.step({"a": [22]}) == [[7]]


def test_the_new_link_breaks_on_the_way(engine):
    old, new = moved_to(engine, silent)
    new.broken = "connection lost"
    assert engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]}) == [[1, 2]], "it stays where it was"
    assert old.broken is None
    assert engine.drafter.epoch == old.epoch
    third = engine.offer(drafting([7]))
    engine.step({"a": [1, 2, 21]}, drafts={"a": [1, 2]})
    assert engine.step({"a": [1, 2, 22]}, drafts={"a": [1, 2]}) == [[7]]
    assert (third.broken, "takes its place" in old.broken) == (None, True)


def test_both_links_break_and_a_third_takes_it_up(engine):
    old, new = moved_to(engine, silent)
    old.broken = new.broken = "connection lost"
    assert engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]}) == [[]]
    third = engine.offer(drafting([7]))
    engine.step({"a": [21]})
    assert opened_with(third) == [[*PROMPT, 8, 1, 2, 9, 1, 2, 20]]
    assert engine.step({"a": [22]}) == [[7]]


def test_another_move_before_the_first_is_over(engine):
    old, second = moved_to(engine, silent)
    third = engine.offer(drafting([7]))
    engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]})
    assert "takes its place" in old.broken
    assert opened_with(third) == [[*PROMPT, 8, 1, 2, 9]]
    assert engine.step({"a": [21]}) == [[7]]
    assert "takes its place" in second.broken
    assert engine.now == 0, "nobody is waited for who is not asked"


@pytest.mark.parametrize("status", [ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH, ProposalStatus.UNKNOWN_REQUEST])
def test_one_that_the_new_drafter_cannot_take_stays(engine, status):
    old, new = moved_to(engine, silent)
    handle = of_kind(new, Open)[0].request
    new.arrive(Proposals(handle, len(PROMPT), [], status))
    for _ in range(3):
        assert engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]}) == [[1, 2]]
    assert old.broken is None
    assert [each.request for each in of_kind(new, Close)] == [handle]
    assert engine.drafter.refused == {status: 1}
    engine.tell(finished=["a"])
    assert "takes its place" in old.broken, "the last one has gone"


def test_one_that_stayed_is_read_at_the_new_one_when_the_old_is_gone(engine):
    is_read = []
    old, new = moved_to(engine, reading_until(is_read))
    first = of_kind(new, Open)[0].request
    new.arrive(Proposals(first, len(PROMPT), [], ProposalStatus.OUT_OF_KV))
    assert engine.step({"a": [1, 2, 20]}, drafts={"a": [1, 2]}) == [[1, 2]]
    old.broken = "connection lost"
    engine.step({"a": [1, 2, 21]}, drafts={"a": [1, 2]})
    assert opened_with(new)[1:] == [[*PROMPT, 8, 1, 2, 9, 1, 2, 20]]
    is_read.append(True)
    new.arrive(Proposals(engine["a"].handle, 1, [], ProposalStatus.READY))
    engine.step({"a": [22]})
    assert engine.step({"a": [23]}) == [[7]]


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_its_end_on_the_way_is_told_to_both(engine, end):
    old, new = moved_to(engine, silent)
    engine.tell(**{end: ["a"]})
    assert len(of_kind(old, Close)) == len(of_kind(new, Close)) == 1
    assert "takes its place" in old.broken


def test_silence_at_the_old_one_ends_that_link_only():
    engine = Engine(drafting([1, 2]), link_deadline_ms=50.0)
    engine.begin("a")
    engine.step({"a": [8]})
    old, new = moved_to(engine, silent)
    old._answer = silent
    for _ in range(3):
        engine.step({"a": [20]})
        engine.sleep(0.04)
    assert "no answer" in old.broken
    assert new.broken is None


def test_an_old_drafter_that_is_late_holds_up_nobody_at_the_new_one():
    engine = Engine(drafting([1, 2]), round_deadline_ms=10.0)
    engine.begin("a")
    engine.step({"a": [8]})
    old, new = moved_to(engine, silent)
    old._answer = silent
    engine.begin(arrival("b", prompt=[3]))
    new._answer = drafting([7])
    new.arrive(Proposals(engine["b"].handle, 1, [], ProposalStatus.READY))
    waits = []
    for number in range(6):
        before = engine.now
        engine.step({"a": [20 + number], "b": [number]})
        waits.append(engine.now - before)
    assert sum(wait > 0 for wait in waits) == 1, "late once, and not waited for until it is heard from"


def test_a_link_that_was_never_taken_is_ended_when_there_is_another():
    engine = Engine(drafting([1]))
    second, third = engine.offer(silent), engine.offer(drafting([7]))
    assert "takes its place" in second.broken
    engine.begin("a")
    assert engine.step({"a": [8]}) == [[7]]
    assert third.broken is None


def test_answers_of_both_are_heard_while_they_move(engine):
    _old, new = moved_to(engine, silent)
    engine.begin(arrival("b", prompt=[3]))
    handle = engine["b"].handle
    new._answer = lambda message: drafting([7])(message) if message.request == handle else []
    new.arrive(Proposals(handle, 1, [], ProposalStatus.READY))
    step = engine.commit({"a": [1, 2, 20], "b": [4]}, drafts={"a": [1, 2]})
    assert engine.round.take_drafts(step, ["a", "b"])[0] == [1, 2]
    step = engine.commit({"a": [1, 2, 21], "b": [5]}, drafts={"a": [1, 2]})
    assert engine.round.take_drafts(step, ["a", "b"]) == [[1, 2], [7]]
