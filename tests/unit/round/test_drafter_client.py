"""What is told to the drafter, whose answer counts, whom a round waits for."""

import numpy as np
import pytest

from outrider.cluster.link.messages import (
    Close,
    CloseReason,
    Commit,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode
from tests.unit.round.scripted_link import GREEDY, PROMPT, Engine, arrival, asked, opened, params, silent


@pytest.fixture
def engine():
    return Engine(silent)


def drafts_of(engine, *request_ids):
    """Return the drafts as handed out, without a wait."""
    return [engine[request_id].draft(99).ids for request_id in request_ids]


def test_a_request_is_opened_once_with_its_own_settings(engine):
    of = params(temperature=0.7, top_p=0.9, top_k=3, seed=-5, extra_args=asked(verification="rejection"))
    engine.begin(arrival(of=of))
    engine.begin()
    (message,) = engine.link.sent
    assert isinstance(message, Open)
    assert list(message.token_ids) == PROMPT
    sampling = message.sampling
    assert message.num_speculative_tokens == 4
    assert (sampling.mode, sampling.temperature, sampling.top_k, sampling.seed) == (
        Mode.REJECTION, pytest.approx(0.7), 3, -5,
    )  # fmt: skip
    assert (sampling.top_p, sampling.top_n) == (pytest.approx(0.9), 2)


def test_an_open_does_not_alias_the_request_s_tokens():
    engine = Engine()
    step = engine.begin("a")
    engine.link = engine.offer()
    engine.drafter.check_link(at_boundary=True)
    engine.round.commit(step, {"a": [8]})
    assert [list(message.token_ids) for message in engine.said(Open)] == [PROMPT]
    assert len(engine.said(Commit)) == 1


def test_a_round_waits_only_once_the_drafter_is_ready(engine):
    handle = opened(engine, ready=False)
    engine.commit({"a": [8]})
    assert engine.said(Commit) == [Commit(handle, 3, [8], 4, 2)]
    assert not engine.drafter.is_awaited(), "still prefilling: do not wait"
    engine.hear(Proposals(handle, 3, [], ProposalStatus.READY))
    assert engine.drafter.is_awaited(), "ready, and a commit is unanswered"
    engine.hear(Proposals(handle, 4, [1, 2]))
    assert not engine.drafter.is_awaited()
    assert drafts_of(engine, "a") == [[1, 2]]


def test_drafts_are_capped_at_the_request_s_own_k(engine):
    of = params(temperature=0.0, extra_args=asked(num_speculative_tokens=2))
    handle = opened(engine, of=of)
    step = engine.commit({"a": [8]})
    assert [(m.num_wanted, m.num_on_miss) for m in engine.said(Commit)] == [(2, 2)]
    engine.hear(Proposals(handle, 4, [1, 2, 3, 4]))
    assert engine.round.take_drafts(step, ["a", "unknown"]) == [[1, 2], []]


def test_a_request_that_sits_a_step_out_keeps_its_drafts_for_the_next(engine):
    handle = opened(engine)
    step = engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [1, 2]))
    assert engine.round.take_drafts(step, ["a"]) == [[1, 2]]
    step = engine.commit({})
    assert engine.round.take_drafts(step, ["a"]) == [[1, 2]], "the scheduler had no room for it"
    engine.commit({"a": [1]})
    assert drafts_of(engine, "a") == [[]]


def q(drafts, columns=2, vocab=100):
    ids = np.array([[draft, *range(vocab, vocab + columns - 1)] for draft in drafts], dtype=np.int32)
    probs = np.full(ids.shape, 1 / columns, dtype=np.float32)
    return SparseQ(ids, probs)


def sampled(engine, verification="rejection"):
    """A request whose drafts are drawn, committed to length 4. Returns its handle."""
    handle = opened(engine, of=params(extra_args=asked(verification=verification)))
    engine.commit({"a": [8]})
    return handle


@pytest.mark.parametrize("cut", [3, 1], ids=["whole", "the scheduler may cut the end off"])
def test_q_stays_with_the_drafts_until_they_are_verified(engine, cut):
    handle, drawn = sampled(engine), q([1, 2, 3])
    engine.hear(Proposals(handle, 4, [1, 2, 3], q=drawn))
    assert drafts_of(engine, "a") == [[1, 2, 3]]
    step = engine.begin(drafts={"a": [1, 2, 3][:cut]})
    assert engine.choose(step, "a") == {"a": ([1, 2, 3][:cut], drawn)}
    engine.round.commit(step, {"a": [1, 9]})
    assert step.draft("a").q is drawn, "it is the step's"
    again = engine.begin(drafts={"a": [1, 2, 3]})
    assert engine.choose(again, "a") == {"a": ([-1, -1, -1], None)}


def test_a_link_that_breaks_after_drafts_were_handed_out_leaves_their_q(engine):
    handle, drawn = sampled(engine), q([1, 2])
    engine.hear(Proposals(handle, 4, [1, 2], q=drawn))
    engine.link.broken = "connection lost"
    step = engine.begin(drafts={"a": [1, 2]})
    assert engine.drafter.epoch == 0
    assert engine.choose(step, "a") == {"a": ([1, 2], drawn)}
    engine.offer()
    step = engine.begin(drafts={"a": [1, 2]})
    assert engine.drafter.epoch == 1
    assert engine.choose(step, "a") == {"a": ([1, 2], drawn)}


def test_more_drafts_than_were_proposed_cannot_be_verified(engine):
    handle = sampled(engine)
    engine.hear(Proposals(handle, 4, [1, 2], q=q([1, 2])))
    step = engine.begin(drafts={"a": [1, 2, 3]})
    assert engine.choose(step, "a") == {"a": ([-1] * 3, None)}
    assert step.width == 4


def test_a_q_of_another_width_than_asked_for_costs_the_proposal(engine):
    handle = sampled(engine)
    engine.hear(Proposals(handle, 4, [1, 2], q=q([1, 2], columns=3)))
    assert drafts_of(engine, "a") == [[]]
    assert engine.drafter.unusable == 1
    assert engine.drafter.degraded == {"unusable": 1}
    assert not engine.drafter.is_awaited()


@pytest.mark.parametrize("of", [GREEDY, params(seed=3)], ids=["greedy", "coupled"])
def test_coupled_and_greedy_drafts_have_no_use_for_a_q(engine, of):
    handle = opened(engine, of=of)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [1, 2], q=q([1, 2])))
    step = engine.begin(drafts={"a": [1, 2]})
    assert engine.choose(step, "a") == {"a": ([1, 2], None)}


@pytest.mark.parametrize("base", [3, 5])
def test_an_answer_for_another_committed_length_is_dropped_and_the_wait_goes_on(engine, base):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, base, [1, 2]))
    assert engine.drafter.stale == 1
    assert engine.drafter.is_awaited(), "the answer to the last commit is still to come"
    assert drafts_of(engine, "a") == [[]]


def test_late_requests_are_counted_and_a_late_answer_still_counts_until_the_next_commit(engine):
    first, _second = opened(engine, "a"), opened(engine, "b")
    engine.commit({"a": [8], "b": [8]})
    assert engine.drafter.give_up_waiting() == [engine["a"], engine["b"]]
    assert engine.drafter.give_up_waiting() == []
    assert engine.drafter.degraded == {"late": 2}
    assert not engine.drafter.is_awaited()
    engine.hear(Proposals(first, 4, [1]))
    assert drafts_of(engine, "a", "b") == [[1], []]


ENDS = {
    "max_tokens": params(temperature=0.0, max_tokens=1),
    "stop_token_ids": params(temperature=0.0, stop_token_ids=[8], ignore_eos=True),
    "all_stop_token_ids": params(temperature=0.0, all_stop_token_ids={8}),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_finishing_commit_is_not_sent_and_not_awaited(engine, end):
    opened(engine, of=ENDS[end])
    engine.commit({"a": [8]})
    assert engine.said(Commit) == []
    assert not engine.drafter.is_awaited()


def test_an_empty_commit_and_an_unknown_request_change_nothing(engine):
    opened(engine)
    engine.commit({"a": [], "nobody": [1]})
    assert engine.said(Commit) == []
    assert engine["a"].token_ids == PROMPT
    assert engine.round.statistics.rounds == 0


ENDED = {CloseReason.FINISHED: "finished", CloseReason.PREEMPTED: "preempted"}


@pytest.mark.parametrize("reason", ENDED)
def test_who_leaves_is_closed_once_and_an_answer_to_the_closed_handle_finds_nobody(engine, reason):
    handle = opened(engine)
    for _ in range(2):
        engine.tell(**{ENDED[reason]: ["a"]})
    assert engine.said(Close) == [Close(handle, reason)]
    assert ("a" in engine.round.requests) == (reason is CloseReason.PREEMPTED)
    engine.hear(Proposals(handle, 4, [1]))
    assert engine.drafter.stale == 1


def test_a_request_that_arrives_under_an_id_in_use_takes_its_place(engine):
    handle = opened(engine)
    engine.begin(arrival(prompt=[1, 2]))
    assert engine.said(Close) == [Close(handle, CloseReason.ABORTED)]
    assert engine["a"].token_ids == [1, 2]


def test_a_resumed_request_is_opened_anew_with_all_its_tokens_and_its_earlier_life_s_answers_are_stale(engine):
    first = opened(engine)
    engine.commit({"a": [8]})
    engine.tell(preempted=["a"])
    assert not engine.drafter.is_awaited()
    sampling = engine["a"].sampling
    engine.begin(resumed=["a"])
    second = engine["a"].handle
    assert second not in (None, first)
    assert [list(message.token_ids) for message in engine.said(Open)] == [PROMPT, [*PROMPT, 8]]
    assert engine["a"].sampling is sampling, "its seed above all"
    engine.hear(Proposals(first, 4, [1, 1]))
    assert drafts_of(engine, "a") == [[]]
    engine.hear(Proposals(second, 4, [2]))
    assert drafts_of(engine, "a") == [[2]]


def test_a_preempted_request_s_drafts_are_dropped_and_no_link_hears_of_it_until_it_is_resumed(engine):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [1, 2]))
    step = engine.begin(preempted=["a"])
    assert engine.round.take_drafts(step, ["a"]) == [[]]
    engine.link = engine.offer()
    engine.begin()
    assert engine.said(Open) == []
    engine.begin(resumed=["a"])
    assert [list(message.token_ids) for message in engine.said(Open)] == [[*PROMPT, 8]]


def test_a_resumed_request_of_which_no_preemption_was_told_is_closed_first(engine):
    handle = opened(engine)
    engine.begin(resumed=["a"])
    assert engine.said(Close) == [Close(handle, CloseReason.PREEMPTED)]
    assert len(engine.said(Open)) == 2


@pytest.mark.parametrize("status", [ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH])
def test_a_drafter_without_room_is_not_waited_for_until_it_drafts_again(engine, status):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [], status))
    assert not engine.drafter.is_awaited()
    assert engine.drafter.refused == {status: 1}
    engine.commit({"a": [9]})
    assert not engine.drafter.is_awaited()
    engine.hear(Proposals(handle, 5, [1]))
    engine.commit({"a": [1, 2]})
    assert engine.drafter.is_awaited()


def test_not_ready_then_ready_waits_for_the_answer_again(engine):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [], ProposalStatus.NOT_READY))
    assert not engine.drafter.is_awaited()
    engine.hear(Proposals(handle, 4, [], ProposalStatus.READY))
    assert engine.drafter.is_awaited()


def test_an_unknown_request_is_opened_anew_with_all_its_tokens(engine):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 3, [], ProposalStatus.UNKNOWN_REQUEST))
    assert engine.said(Close) == [Close(handle, CloseReason.ABORTED)]
    again = engine.said(Open)[-1]
    assert again.request != handle
    assert list(again.token_ids) == [*PROMPT, 8]
    assert not engine.drafter.is_awaited()


def test_a_link_that_goes_down_takes_waits_and_unsent_messages_with_it(engine):
    handle = opened(engine)
    engine.commit({"a": [8]})
    engine.hear(Proposals(handle, 4, [1]))
    engine.link.broken = "connection lost"
    engine.commit({"a": [9]})
    assert not engine.drafter.is_awaited()
    assert drafts_of(engine, "a") == [[]]
    engine.commit({"a": [10]})
    engine.tell(finished=["nobody"])
    engine.link = engine.offer()
    engine.begin()
    (again,) = engine.link.sent
    assert list(again.token_ids) == [*PROMPT, 8, 9, 10]
    assert again.request != handle, "a handle is never used twice"


def test_messages_of_the_other_direction_are_ignored(engine):
    handle = opened(engine)
    engine.link.arrive(Commit(handle, 3, [1], 4, 2), Close(handle, CloseReason.FINISHED))
    engine.step({"a": [8]})
    assert "a" in engine.round.requests
    assert engine.drafter.stale == 0


PLAIN = {
    "a prompt without ids": arrival(prompt=None),
    "none wanted": arrival(of=params(temperature=0.0, extra_args=asked(num_speculative_tokens=0))),
}


@pytest.mark.parametrize("case", PLAIN)
def test_who_decodes_plainly_is_never_told_of(engine, case):
    engine.begin(PLAIN[case])
    assert engine.step({"a": [8]}) == [[]]
    engine.offer()
    engine.step({"a": [9]})
    engine.tell(finished=["a"])
    assert engine.link.sent == []
    assert engine.drafter.degraded == {}
    assert engine.round.metrics()["wanted"] == {}
    assert engine.round.statistics.rounds == 2


# What is counted.


def test_a_request_without_a_link_is_degraded_once():
    engine = Engine()
    engine.begin("a")
    for _ in range(3):
        engine.commit({"a": [5]})
    assert engine.round.metrics()["degraded"] == {"no_link": 1}
