"""The verifier's rounds over a link made of two lists: commits out, proposals in."""

import pytest
from tests.unit.target.scripted_link import PROMPT, FakeLink, drafting, make, never_after_ready, step, tracked

from outrider.actors.round.length import FixedLengths
from outrider.cluster.link.messages import Close, CloseReason, Commit, Open, Origin, Proposals, ProposalStatus

pytestmark = pytest.mark.timeout(30)


def test_a_round_tells_the_drafter_and_brings_its_drafts_back():
    link = FakeLink(drafting([1, 2, 3]))
    verifier = make(link)
    verifier.track(tracked())
    assert step(verifier, {"a": [8]}) == [[1, 2, 3]]
    opened, commit = link.sent
    assert list(opened.token_ids) == PROMPT
    assert (commit.base_committed_len, list(commit.token_ids)) == (3, [8])
    assert step(verifier, {"a": [1, 2, 9]}, {"a": 3}) == [[1, 2, 3]]
    assert link.sent[-1].base_committed_len == 4
    status = verifier.status()
    assert (status["rounds"], status["drafted_rounds"], status["drafted"], status["accepted"]) == (2, 1, 3, 2)
    assert (status["late_rounds"], status["dropped_proposals"]) == (0, 0)


def test_opens_leave_before_the_target_s_forward_pass():
    link = FakeLink()
    verifier = make(link)
    verifier.track(tracked())
    verifier.begin_step()
    assert [type(message) for message in link.sent] == [Open]


def test_a_finished_request_is_neither_committed_nor_waited_for():
    link = FakeLink(drafting([1]))
    verifier = make(link)
    verifier.track(tracked())
    verifier.begin_step()
    link.polls.clear()
    assert step(verifier, {"a": [8]}, finished=["a"]) == [[]]
    assert max(link.polls) == 0.0
    verifier.untrack("a", CloseReason.FINISHED)
    verifier.begin_step()
    assert link.sent[-1] == Close(link.sent[0].request, CloseReason.FINISHED)


def test_idle_time_is_nobody_s_round():
    link = FakeLink(drafting([1]))
    verifier = make(link)
    verifier.track(tracked())
    step(verifier, {"a": [8]})
    verifier.goes_idle()
    step(verifier, {"a": [9]})
    assert "median" not in verifier.status()
    step(verifier, {"a": [10]})
    assert verifier.status()["median"]["samples"] == 1


def test_the_drafter_s_own_time_is_what_it_reports():
    link = FakeLink(never_after_ready)
    verifier = make(link)
    verifier.track(tracked())
    verifier.begin_step()
    link.arrive(Proposals(link.sent[0].request, 4, [1]), work_us=7000)
    step(verifier, {"a": [8]})
    step(verifier, {"a": [9]})
    assert verifier.status()["median"]["draft_ms"] == pytest.approx(7.0)


def test_forgetting_the_warm_up():
    verifier = make(FakeLink(drafting([1])))
    verifier.track(tracked())
    step(verifier, {"a": [8]})
    verifier.reset_statistics()
    assert verifier.status()["rounds"] == 0


CONTROLLER = ("choose", "observe_answer", "observe_round", "observe_step", "snapshot", "track", "untrack")


@pytest.mark.parametrize("fails", CONTROLLER)
def test_a_controller_that_fails_ends_drafting_and_not_the_engine(fails, caplog):
    assert set(CONTROLLER) == {name for name in vars(FixedLengths) if not name.startswith("_")}
    lengths = FixedLengths(4)

    def fail(*_):
        raise ZeroDivisionError("a test")

    setattr(lengths, fails, fail)
    verifier = make(FakeLink(drafting([1, 2, 3])), lengths=lengths)
    for request_id in ("a", "b"):  # whatever failed for the first does not for the second
        verifier.track(tracked(request_id))
        step(verifier, {request_id: [7]})
        step(verifier, {request_id: [1, 2, 3, 9]}, {request_id: 3})
        verifier.status()
        verifier.untrack(request_id, CloseReason.FINISHED)
    verifier.track(tracked("c"))
    assert step(verifier, {"c": [7]}) == [[]]
    assert verifier.metrics()["length_controller_failures"] == 1
    assert caplog.text.count("the length controller failed") == 1
    assert [type(message) for message in verifier._link.sent].count(Open) == 3, "requests are followed all the same"


def test_refused_answers_reach_the_controller_as_none():
    seen = []

    class Watching(FixedLengths):
        def observe_answer(self, request_id, origin, num_tokens, draft_step_s, wait_s):
            seen.append((request_id, origin, num_tokens))

    def out_of_kv(message):
        if isinstance(message, Commit):
            return [Proposals(message.request, message.committed_len, [], ProposalStatus.OUT_OF_KV)]
        return never_after_ready(message)

    verifier = make(FakeLink(out_of_kv))
    verifier._lengths = Watching(4)
    verifier.track(tracked())
    step(verifier, {"a": [7]})
    assert seen == [("a", Origin.NONE, 0)]
