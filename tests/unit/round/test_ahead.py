"""Drafts that are there before their round's outcome: nobody is asked."""

import pytest

from outrider.actors.round.length import Lengths
from outrider.cluster.link.messages import (
    CloseReason,
    Commit,
    DraftOrigin,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
)
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, opened, params, silent

BASE = len(PROMPT) + 1


@pytest.fixture
def engine():
    """One request, whose round over the drafts [1, 2] is being verified."""
    engine = Engine(silent)
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, BASE, [1, 2]))
    return engine


def ahead(engine, accepted=2, token=9, drafts=(11, 12, 13, 14), base=BASE, **changes):
    fields = {"origin": DraftOrigin.MAIN_LINE, "step_us": 1500, **changes}
    return PrefetchedProposal(engine["a"].handle, base, base + accepted, token, list(drafts), **fields)


def outcome(engine, token_ids=(1, 2, 9)):
    """The drafts of the next round, and the commit that was said."""
    drafts = engine.step({"a": list(token_ids)}, drafts={"a": [1, 2]})
    return drafts, engine.said(Commit)[-1]


@pytest.mark.parametrize(("accepted", "token_ids"), [(2, (1, 2, 9)), (1, (1, 9)), (0, (9,))])
def test_the_outcome_that_came_is_taken_and_nobody_is_waited_for(engine, accepted, token_ids):
    engine.link.arrive(ahead(engine, 0, 5), ahead(engine, accepted), ahead(engine, 1, 7))
    now = engine.now
    drafts, commit = outcome(engine, token_ids)
    assert drafts == [[11, 12, 13, 14]]
    assert commit == Commit(engine["a"].handle, BASE, list(token_ids), 4, 2, True)
    assert engine.now == now
    assert not engine.drafter.is_unanswered()
    counted = engine.round.statistics
    assert (counted.foreseen, counted.main_line_hits, counted.draft_step_ms) == (1, 1, 1.5)
    assert counted.proposals == 3, "those that nothing came of are on the link, too"


def test_its_drafts_are_verified_as_any_others(engine):
    engine.link.arrive(ahead(engine))
    outcome(engine)
    step = engine.begin(drafts={"a": [11, 12, 13, 14]})
    assert engine.choose(step, "a")["a"] == ([11, 12, 13, 14], None)


def test_fewer_are_taken_where_fewer_are_wanted_and_fewer_than_wanted_are_asked_for(engine):
    engine.lengths.wanted = Lengths(3, 2)
    engine.link.arrive(ahead(engine))
    assert outcome(engine)[0] == [[11, 12, 13]]
    engine.link.arrive(ahead(engine, 3, 9, drafts=[21, 22], base=BASE + 3))
    engine.commit({"a": [11, 12, 13, 9]}, drafts={"a": [11, 12, 13]})
    assert not engine.said(Commit)[-1].has_drafts
    assert engine.drafter.is_awaited(), "the drafter may have more by now"


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": 10},
        {"accepted": 1},
        {"base": BASE - 1, "accepted": 3},
        {"base": BASE + 1, "accepted": 1},
    ],
    ids=["another token", "another position", "an earlier round", "a later round"],
)
def test_for_any_other_outcome_the_drafter_is_asked(engine, wrong):
    engine.link.arrive(ahead(engine, **wrong))
    drafts, commit = outcome(engine)
    assert drafts == [[]]
    assert not commit.has_drafts
    assert engine.round.statistics.foreseen == 0


def test_of_a_round_that_is_over_nothing_is_kept(engine):
    engine.link.arrive(ahead(engine), ahead(engine, 0, 5))
    outcome(engine)
    assert engine["a"].prefetched == {}


def test_none_is_taken_where_no_drafts_are_wanted(engine):
    engine.lengths.wanted = Lengths(0, 0)
    engine.link.arrive(ahead(engine))
    drafts, commit = outcome(engine)
    assert (drafts, commit.num_wanted, commit.has_drafts) == ([[]], 0, False)


@pytest.mark.parametrize(("top_n", "expected"), [(2, ([[]], False)), (0, ([[11, 12, 13, 14]], True))])
def test_where_drafts_are_sampled_none_is_believed_without_its_q(top_n, expected):
    engine = Engine(silent, draft_top_n=top_n)
    handle = opened(engine, of=params(temperature=1.0))
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, BASE, [1, 2], ProposalStatus.OK))
    engine.link.arrive(ahead(engine))
    drafts, commit = outcome(engine)
    assert (drafts, commit.has_drafts) == expected


def test_a_life_of_a_request_that_is_over_leaves_nothing_to_the_next(engine):
    engine.hear(ahead(engine))
    engine.tell(preempted=["a"])
    assert engine["a"].prefetched == {}
    engine.begin(resumed=["a"])
    engine.hear(ahead(engine))
    engine.drafter.close(engine["a"], CloseReason.ABORTED)
    assert engine["a"].prefetched == {}


def test_a_drafter_cannot_fill_the_memory_with_them(engine):
    engine.hear(*(ahead(engine, 2, token) for token in range(5000)))
    assert len(engine["a"].prefetched) <= 128


def test_one_of_a_handle_that_nobody_knows_is_no_stale_answer(engine):
    message = ahead(engine)
    message.request = 999
    engine.hear(message)
    assert engine.drafter.stale == 0


def test_others_of_the_batch_are_waited_for(engine):
    engine.begin(arrival("b"))
    handle = engine["b"].handle
    engine.hear(Proposals(handle, len(PROMPT), [], ProposalStatus.READY))
    engine.link.arrive(ahead(engine))
    step = engine.commit({"a": [1, 2, 9], "b": [4]}, drafts={"a": [1, 2]})
    assert engine.drafter.is_awaited()
    engine.link.arrive(Proposals(handle, BASE, [6]))
    assert engine.round.take_drafts(step, ["a", "b"]) == [[11, 12, 13, 14], [6]]
