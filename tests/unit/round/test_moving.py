"""A change of links: every request is opened on the new one, and decodes plainly until its first answer."""

import pytest

from outrider.cluster.link.messages import Close, Commit, Open, Proposals
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, drafting, silent


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


def test_another_change_before_the_first_answer(engine):
    second = engine.offer(silent)
    engine.step({"a": [9]})
    third = engine.offer(drafting([7]))
    engine.step({"a": [10]})
    assert "takes its place" in second.broken
    assert opened_with(third) == [[*PROMPT, 8, 9]]
    assert engine.step({"a": [11]}) == [[7]]


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


def test_what_was_not_sent_over_the_old_link_is_not_sent_over_the_new_one(engine):
    engine.drafter.close(engine["a"], reason=1)
    new = engine.offer(silent)
    engine.begin()
    assert [message for message in new.sent if isinstance(message, Close)] == []
