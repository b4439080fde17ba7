"""Checks rounds over a link made of two lists: commits, proposals, what a step keeps to itself, and counts."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.actors.round.length import FixedLengths, LengthController
from outrider.actors.round.request import Draft
from outrider.actors.round.statistics import RoundStatistics
from outrider.cluster.drafter_registry import Work
from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftPath,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from tests.unit.round.scripted_link import (
    PROMPT,
    Engine,
    Wanting,
    arrival,
    asked,
    drafting,
    never_after_ready,
    opened,
    params,
    silent,
)


def test_a_round_tells_the_drafter_and_brings_its_drafts_back():
    engine = Engine(drafting([1, 2, 3]))
    engine.begin("a")
    assert engine.step({"a": [8]}) == [[1, 2, 3]]
    opening, commit = engine.link.sent
    assert list(opening.token_ids) == PROMPT
    assert (commit.base_committed_len, list(commit.token_ids)) == (3, [8])
    assert engine.step({"a": [1, 2, 9]}, {"a": [1, 2, 3]}) == [[1, 2, 3]]
    assert engine.link.sent[-1].base_committed_len == 4
    status = engine.round.status()
    assert (status["rounds"], status["drafted_rounds"], status["drafted"], status["accepted"]) == (2, 1, 3, 2)
    assert (status["late_rounds"], status["dropped_proposals"]) == (0, 0)


def test_a_step_that_was_scheduled_ahead_gets_as_many_drafts_as_it_has_room_for():
    engine = Engine(drafting([1, 2, 3]))
    engine.begin("a", "b", "c", num_requests=3)
    engine.commit({"a": [8], "b": [8]})
    step = engine.begin(num_requests=3)
    assert engine.round.insert_drafts(step, ["c", "b", "a"], [0, 2, 4]) == [[], [1, 2], [1, 2, 3]]


def test_who_has_ended_is_told_from_who_drafts_nothing():
    """Its next step was scheduled before that was known, and has nothing to do for it."""
    engine = Engine(silent)
    engine.begin("a", arrival("b", of=params(temperature=0.0, max_tokens=1)), num_requests=2)
    engine.commit({"a": [8], "b": [8]})
    step = engine.begin(num_requests=2)
    assert engine.round.insert_drafts(step, ["a", "b"], [4, 4]) == [[], None]
    engine.tell(finished=["b"])
    engine.begin(arrival("b", of=params(temperature=0.0, max_tokens=1)))
    assert engine.round.insert_drafts(step, ["b"], [0]) == [[]], "the same name, another request"


def test_a_prompt_with_pictures_is_drafted_for_as_the_text_it_is_to_the_drafter():
    engine = Engine(drafting([1, 2]))
    engine.begin(replace(arrival("a", prompt=[5, 19_999, 6]), num_pictures=1), "b", num_requests=2)
    assert engine.step({"a": [8], "b": [8]}) == [[1, 2], [1, 2]]
    assert list(engine.said(Open)[0].token_ids) == [5, 19_999, 6]
    assert engine.round.metrics()["picture_requests"] == 1


@pytest.mark.parametrize("strange", [20_000, -200])
def test_a_picture_s_place_that_no_vocabulary_has_is_never_told(strange):
    engine = Engine(drafting([1, 2]))
    engine.begin(replace(arrival("a", prompt=[5, strange, 6]), num_pictures=1))
    assert engine.step({"a": [8]}) == [[]]
    assert engine.link.sent == []


def test_a_prompt_in_chunks_commits_nothing_until_it_is_done():
    engine = Engine(drafting([1]))
    engine.begin("a")
    assert engine.step({"a": []}, decodes_only=False) == [[]]
    assert engine.said(Commit) == []
    assert engine.round.statistics.rounds == 0
    assert engine.step({"a": [8]}, decodes_only=False) == [[1]]


# What a step keeps to itself.


def drawn(*drafts):
    ids = np.array([[draft, 100 + draft] for draft in drafts], dtype=np.int32)
    return SparseQ(ids, np.full(ids.shape, 0.5, dtype=np.float32))


def test_a_step_keeps_its_own_drafts_and_q():
    engine = Engine(silent)
    handle = opened(engine, of=params())
    engine.commit({"a": [8]})
    first_q, second_q = drawn(1, 2), drawn(3, 5)
    engine.hear(Proposals(handle, 4, [1, 2], q=first_q))
    first = engine.begin(drafts={"a": [-1] * 4})
    assert engine.round.insert_drafts(first, ["a"], [4]) == [[1, 2]]
    assert engine.choose(first, "a") == {"a": ([1, 2], first_q)}
    engine.round.commit(first, {"a": [1, 9]})
    second = engine.begin(drafts={"a": [-1] * 4})
    engine.link.arrive(Proposals(handle, 6, [3, 5], q=second_q))
    assert engine.round.insert_drafts(second, ["a"], [1]) == [[3]]
    assert engine.choose(second, "a") == {"a": ([3], second_q)}
    engine.round.commit(second, {"a": [3, 4]})
    assert (first.drafts, first.width) == ({"a": Draft([1, 2], first_q)}, 3)
    assert (second.drafts, second.width) == ({"a": Draft([3], second_q)}, 2)
    assert engine["a"].token_ids == [*PROMPT, 8, 1, 9, 3, 4]
    assert [(m.base_committed_len, list(m.token_ids)) for m in engine.said(Commit)] == [
        (3, [8]), (4, [1, 9]), (6, [3, 4]),
    ]  # fmt: skip
    counts = engine.round.statistics
    assert (counts.rounds, counts.drafted, counts.accepted) == (3, 3, 2)


@pytest.mark.parametrize("event", ["finished", "preempted"])
def test_who_goes_while_its_step_is_under_way_gets_no_commit(event):
    engine = Engine(silent)
    opened(engine, "a"), opened(engine, "b")
    first = engine.begin(num_requests=2)
    engine.begin(**{event: ["a"]})
    engine.round.commit(first, {"a": [8], "b": [9]})
    assert [list(message.token_ids) for message in engine.said(Commit)] == [[9]]
    assert engine.round.metrics()["degraded"] == {}
    if event == "preempted":
        engine.begin(resumed=["a"])
        assert list(engine.said(Open)[-1].token_ids) == [*PROMPT, 8]


class Stepped(FixedLengths):
    def __init__(self):
        super().__init__(4)
        self.seen = []

    def observe_step(self, num_tokens, step_s):
        self.seen.append((num_tokens, step_s))


def test_times_are_each_step_s_own():
    engine = Engine(lengths=Stepped())
    engine.begin("a", decodes_only=False)
    engine.round.reset_statistics()

    first = engine.begin(num_requests=1)
    first.target_s, first.wait_s = 0.75, 0.25
    engine.round.commit(first, {"a": [8]})
    engine.sleep(1.0)
    second = engine.begin(num_requests=2)
    second.target_s = 1.5
    engine.round.commit(second, {"a": [8]})
    engine.sleep(2.0)
    engine.begin(num_requests=3, decodes_only=False)
    assert engine.lengths.seen == [(1, 0.75), (2, 2.0)]
    sums = {part: histogram["sum"] for part, histogram in engine.round.metrics()["histograms"].items()}
    assert sums == {"period": 3.0, "target": 2.25, "draft": 0.0, "wait": 0.25}


# Times.


def test_a_step_with_prefill_is_in_no_times():
    engine = Engine(lengths=Stepped())
    engine.begin("a", decodes_only=False)
    for decodes_only in (False, True, True):
        engine.commit({"a": [1]}, decodes_only=decodes_only)
        engine.sleep(1.0)
    assert engine.lengths.seen == [(1, 1.0)]
    assert engine.round.metrics()["histograms"]["period"]["sum"] == 1.0


def test_a_step_s_time_has_its_wait_for_drafts_and_its_cost_has_not():
    engine = Engine(never_after_ready, lengths=Stepped(), round_deadline_ms=500.0)
    engine.begin("a")
    engine.round.reset_statistics()
    engine.step({"a": [8]})
    engine.sleep(0.25)
    engine.begin()
    assert engine.lengths.seen == [(1, 0.25)]
    median = engine.round.status()["median"]
    assert (median["period_ms"], median["wait_ms"]) == (750.0, 500.0)


# The length controller.

CONTROLLER = (
    "choose",
    "observe_answer",
    "observe_round",
    "observe_step",
    "rates",
    "round_price",
    "token_price",
    "snapshot",
    "track",
)


@pytest.mark.parametrize("fails", CONTROLLER)
def test_a_controller_that_fails_ends_drafting_and_not_the_engine(fails, caplog):
    assert set(CONTROLLER) == {name for name in vars(FixedLengths) if not name.startswith("_")}
    lengths = FixedLengths(4)

    def fail(*_):
        raise ZeroDivisionError("a test")

    setattr(lengths, fails, fail)
    engine = Engine(drafting([1, 2, 3], paths=(DraftPath([4], 0.5),)), lengths=lengths, num_paths=2)
    for request_id in ("a", "b"):  # whatever failed for the first does not for the second
        engine.begin(request_id)
        engine.step({request_id: [7]})
        engine.step({request_id: [1, 2, 3, 9]}, {request_id: [1, 2, 3]})
        engine.round.insert_drafts(engine.begin(drafts={request_id: [-1] * 4}), [request_id], [4])
        engine.round.status()
        engine.round.work()
        engine.tell(finished=[request_id])
    engine.begin("c")
    assert engine.step({"c": [7]}) == [[]]
    assert engine.round.metrics()["length_controller_failures"] == 1
    assert caplog.text.count("the length controller failed") == 1
    assert len(engine.said(Open)) == 3, "requests are followed all the same"


def test_what_the_target_does_is_what_its_controller_expects():
    class Expecting(FixedLengths):
        def rates(self):
            return 60.0, 40.0

    engine = Engine(drafting([1]), lengths=Expecting(4))
    assert engine.round.work() == Work(0, 60.0, 40.0)
    engine.begin("a")
    assert engine.round.work() == Work(1, 60.0, 40.0)
    engine.tell(finished=["a"])
    assert not engine.round.work().is_busy


def test_rows_are_requests_that_run_and_may_be_drafted_for():
    engine = Engine(drafting([1]))
    engine.begin("a", "b", "c", arrival("plain", of=params(extra_args=asked(num_speculative_tokens=0))), num_requests=4)
    assert engine.round.work().rows == 3
    engine.tell(preempted=["a"])
    engine.round.has_no_next_token("b")
    assert engine.round.work().rows == 1
    engine.begin(resumed=["a"])
    assert engine.round.work().rows == 2
    engine.tell(finished=["a", "b", "c"])
    assert not engine.round.work().is_busy, "with nothing left but what decodes plainly"


class Watching(FixedLengths):
    def __init__(self):
        super().__init__(4)
        self.seen = []

    def observe_answer(self, estimate, origin, num_tokens, draft_step_s, wait_s):
        self.seen.append((estimate, origin, num_tokens, draft_step_s))


ANSWERS = {
    "drafts": ({"token_ids": [1], "origin": DraftOrigin.MISS, "step_us": 2500}, (DraftOrigin.MISS, 1, 0.0025)),
    "a refusal": ({"token_ids": [], "status": ProposalStatus.OUT_OF_KV}, (DraftOrigin.NONE, 0, 0.0)),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_reach_the_controller_with_the_request_s_own_estimate(case):
    fields, seen = ANSWERS[case]

    def answer(message):
        if isinstance(message, Commit):
            return [Proposals(message.request, message.committed_len, **fields)]
        return never_after_ready(message)

    engine = Engine(answer, lengths=Watching())
    engine.begin("a", "b")
    engine.step({"b": [7]})
    assert engine.lengths.seen == [(engine["b"].estimate, *seen)]
    assert engine["a"].estimate is not engine["b"].estimate


def test_what_was_learnt_of_a_request_outlives_its_preemption():
    engine = Engine(drafting([1, 2]), lengths=LengthController(4))
    engine.begin("a", arrival("plain", prompt=None))
    engine.step({"a": [8]})
    engine.step({"a": [1, 2, 9]}, {"a": [1, 2]})
    estimate = engine["a"].estimate
    engine.begin(preempted=["a"])
    engine.begin(resumed=["a"])
    assert engine["a"].estimate is estimate
    assert (estimate.max_drafts, engine["plain"].estimate.max_drafts) == (4, 0)


# Proposals that verification cannot use.


def test_drafts_that_a_grammar_cut_are_neither_counted_nor_learned_from():
    seen = []
    lengths = Wanting()
    lengths.observe_round = lambda estimate, drafted, accepted: seen.append((drafted, accepted))
    engine = Engine(drafting([1, 2, 3], paths=(DraftPath([4], 0.5),)), lengths=lengths, num_paths=2)
    engine.begin("a")
    step = engine.begin(drafts={"a": [1, 2, -1]})
    step.allowed["a"] = 2
    engine.round.commit(step, {"a": [1, 9]})
    step = engine.begin(drafts={"a": [-1, -1, -1]})
    step.allowed["a"] = 0
    engine.round.commit(step, {"a": [9]})
    status = engine.round.status()
    assert (status["drafted_rounds"], status["drafted"], status["accepted"]) == (1, 2, 1)
    assert seen == [(2, 1)]


def test_who_has_no_next_token_has_no_next_step_either():
    engine = Engine(silent)
    engine.begin("a")
    engine.round.has_no_next_token("a")
    engine.commit({"a": []})
    assert engine.round.insert_drafts(engine.begin(), ["a"], [4]) == [None]


def test_a_plain_round_counts_as_a_round_and_as_nothing_else():
    statistics = RoundStatistics()
    statistics.count(0, 1)
    snapshot = statistics.snapshot()
    assert {name: value for name, value in snapshot.items() if value} == {"rounds": 1, "mean_acceptance_length": 1.0}


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
