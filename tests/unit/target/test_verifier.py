"""The verifier's rounds over a link made of two lists: commits out, proposals in, late answers, broken links."""

import time

import pytest

from actors.length.fixed import FixedLengths
from actors.length.origin import Origin
from actors.message_codec import unpack
from actors.messages import Close, CloseReason, Commit, Open, Proposals, ProposalStatus
from actors.target.rounds import TrackedRequest
from actors.target.verifier import Verifier
from cluster.config import LinkConfig
from cluster.link import LinkBroken, Received
from cluster.link_keeper import HANG

pytestmark = pytest.mark.timeout(30)

PROMPT = [5, 6, 7]


class FakeLink:
    """What the verifier uses of a Link. answer: called with every message posted; what it returns arrives at once."""

    capacity_words = 512

    def __init__(self, answer=lambda message: []):
        self.broken = None
        self.sent, self.inbox, self.polls = [], [], []
        self._answer = answer

    def post(self, payloads, work_us=0):
        if self.broken:
            raise LinkBroken(self.broken)
        for payload in payloads:
            for message in unpack(payload, 1000, 8):
                self.sent.append(message)
                self.arrive(*self._answer(message))

    def arrive(self, *proposals, work_us=0):
        if proposals:
            self.inbox.append(Received(list(proposals), work_us, 0, 0))

    def poll(self, timeout_s=0.0):
        self.polls.append(timeout_s)
        if self.inbox:
            return self.inbox.pop(0)
        time.sleep(timeout_s)
        return None

    def abort(self, reason):
        self.broken = f"aborted on this side: {reason}"


def drafting(drafts):
    """A drafter that is ready at once and answers every commit with drafts."""

    def answer(message):
        if isinstance(message, Open):
            return [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)]
        if isinstance(message, Commit) and message.num_wanted:
            return [Proposals(message.request, message.committed_len, drafts)]
        return []

    return answer


def never_after_ready(message):
    return (
        [Proposals(message.request, message.prompt_len, [], ProposalStatus.READY)] if isinstance(message, Open) else []
    )


def make(link=None, round_deadline_ms=10.0, link_deadline_ms=60_000.0):
    verifier = Verifier(
        LinkConfig(round_deadline_ms=round_deadline_ms, link_deadline_ms=link_deadline_ms), FixedLengths(4)
    )
    if link is not None:
        verifier.offer_link(link)
        verifier.begin_step()
    return verifier


def tracked(request_id="a"):
    return TrackedRequest(request_id, list(PROMPT), 4)


def step(verifier, committed, num_drafts=None, finished=()):
    verifier.step_starts(len(committed), len(committed), decodes_only=True)
    verifier.begin_step()
    verifier.end_step(committed, num_drafts or {}, finished)
    return verifier.take_drafts(list(committed))


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


def test_a_controller_that_fails_ends_drafting_and_not_the_engine(caplog):
    class Failing(FixedLengths):
        def choose(self, request_ids):
            raise ZeroDivisionError("a test")

    verifier = make(FakeLink(drafting([1, 2, 3])))
    verifier._lengths = Failing(4)
    verifier.track(tracked())
    for _ in range(3):
        assert step(verifier, {"a": [7]}) == [[]]
    assert caplog.text.count("the length controller failed") == 1


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
