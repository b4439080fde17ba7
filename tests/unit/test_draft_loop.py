"""The drafter's loop over a scripted strategy: batches over links, prefill between rounds, sequences that go."""

import queue
import threading

import numpy as np
import pytest

from actors.drafting.loop import DraftLoop
from actors.drafting.strategy import Draft, UnknownSequence
from actors.messages import Close, CloseReason, Commit, DraftSampling, Open, Proposals, ProposalStatus, SparseQ
from actors.verification.mode import Mode

pytestmark = pytest.mark.timeout(30)

SOON_S = 10.0
BIASED = DraftSampling(Mode.REJECTION, temperature=1.0, biases=((1, 2.0),))


class FakeStrategy:
    """Drafts [committed length, 0]. Prompts of 100 tokens and more take one prefill call per 100."""

    def __init__(self):
        self.lengths, self.pending, self.calls, self.samplings = {}, {}, [], {}
        self.q = None
        self.max_batch = 100
        self.gate = threading.Event()
        self.gate.set()
        self.drafting = threading.Event()

    def open(self, key, token_ids, num_speculative_tokens, sampling):
        self.samplings[key] = sampling
        self.calls.append(("open", key))
        self.lengths[key], self.pending[key] = len(token_ids), len(token_ids) // 100
        return not self.pending[key]

    def commit(self, key, base_committed_len, token_ids):
        if self.lengths.get(key) != base_committed_len:
            raise UnknownSequence(key)
        self.lengths[key] += len(token_ids)

    def close(self, key):
        self.calls.append(("close", key))
        self.lengths.pop(key, None)
        self.pending.pop(key, None)

    def draft(self, keys):
        self.calls.append(("draft", tuple(keys)))
        self.drafting.set()
        assert self.gate.wait(SOON_S)
        answers = []
        for key in list(keys)[: self.max_batch]:
            if self.pending[key]:
                answers.append(Draft(key, self.lengths[key], [], ProposalStatus.NOT_READY))
            else:
                answers.append(Draft(key, self.lengths[key], [self.lengths[key], 0], ProposalStatus.OK, self.q))
        return answers

    def prefill(self):
        waiting = [key for key, chunks in self.pending.items() if chunks]
        if not waiting:
            return None
        self.calls.append(("prefill", waiting[0]))
        self.pending[waiting[0]] -= 1
        if self.pending[waiting[0]]:
            return []
        return [Draft(waiting[0], self.lengths[waiting[0]], [], ProposalStatus.READY)]

    def usage(self):
        return {"num_sequences": len(self.lengths), "num_prefilling": 0, "kv_cache_usage": 0.0}


class Sink:
    def __init__(self):
        self.answers = queue.Queue()

    def send(self, proposals, work_us):
        self.answers.put((list(proposals), work_us))

    def next(self):
        return self.answers.get(timeout=SOON_S)[0]


@pytest.fixture
def strategy():
    return FakeStrategy()


@pytest.fixture
def loop(strategy):
    ticks = iter(range(10**6))
    loop = DraftLoop(strategy, clock=lambda: next(ticks) / 1000)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    yield loop
    strategy.gate.set()
    loop.stop()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.fixture
def link(loop):
    def attach(link_id):
        sink = Sink()
        loop.attach(link_id, sink)
        return sink

    return attach


def opening(request, tokens, offset=0, prompt_len=None, sampling=DraftSampling()):  # noqa: B008
    ids = list(range(tokens))
    return Open(request, prompt_len or tokens, offset, ids, 4, sampling)


def test_open_commit_propose(loop, link):
    sink = link(1)
    loop.deliver(1, [opening(7, 3)])
    assert sink.next() == [Proposals(7, 3, [], ProposalStatus.READY)]
    loop.deliver(1, [Commit(7, 3, [9])])
    answers, work_us = sink.answers.get(timeout=SOON_S)
    assert answers == [Proposals(7, 4, [4, 0])]
    assert work_us == 1000, "the clock's two ticks around the draft"


def test_requests_of_all_links_are_one_batch_and_each_link_gets_its_own_answers(loop, link, strategy):
    first, second = link(1), link(2)
    loop.deliver(1, [opening(7, 3), opening(8, 5)])
    loop.deliver(2, [opening(7, 4)])
    assert [len(first.next()), len(first.next()), len(second.next())] == [1, 1, 1]
    strategy.gate.clear()
    loop.deliver(1, [Commit(8, 5, [1])])
    assert strategy.drafting.wait(SOON_S)
    loop.deliver(1, [Commit(7, 3, [1])])
    loop.deliver(2, [Commit(7, 4, [1])])
    strategy.gate.set()
    assert first.next() == [Proposals(8, 6, [6, 0])]
    assert first.next() == [Proposals(7, 4, [4, 0])]
    assert second.next() == [Proposals(7, 5, [5, 0])]
    assert ("draft", ((1, 7), (2, 7))) in strategy.calls


def test_two_commits_in_the_queue_are_answered_once_at_the_later_length(loop, link):
    sink = link(1)
    loop.deliver(1, [opening(7, 3)])
    sink.next()
    loop.deliver(1, [Commit(7, 3, [1]), Commit(7, 4, [2])])
    assert sink.next() == [Proposals(7, 5, [5, 0])]
    assert sink.answers.empty()


def test_what_does_not_fit_a_batch_is_drafted_in_the_next(loop, link, strategy):
    strategy.max_batch = 2
    sink = link(1)
    loop.deliver(1, [opening(request, 3) for request in range(5)])
    for _ in range(5):
        sink.next()
    loop.deliver(1, [Commit(request, 3, [1]) for request in range(5)])
    answered = [proposal for _ in range(3) for proposal in sink.next()]
    assert [proposal.request for proposal in answered] == [0, 1, 2, 3, 4]


def test_what_is_left_of_many_batches_is_drafted_too_when_there_is_nothing_to_prefill(loop, link, strategy):
    """The loop looks for prefill after some rounds; finding none, it must not sleep on what is still due."""
    strategy.max_batch = 1
    sink = link(1)
    requests = range(1, 14)
    loop.deliver(1, [opening(request, 3) for request in requests])
    loop.deliver(1, [Commit(request, 3, [4]) for request in requests])
    drafted = set()
    while len(drafted) < len(requests):
        drafted |= {proposal.request for proposal in sink.next() if proposal.status is ProposalStatus.OK}


def test_an_unknown_request_is_said_to_be_unknown(loop, link):
    sink = link(1)
    loop.deliver(1, [Commit(7, 3, [1])])
    assert sink.next() == [Proposals(7, 3, [], ProposalStatus.UNKNOWN_REQUEST)]
    loop.deliver(1, [opening(7, 3), Commit(7, 9, [1])])
    assert sink.next() == [Proposals(7, 3, [], ProposalStatus.READY)]
    assert sink.next() == [Proposals(7, 9, [], ProposalStatus.UNKNOWN_REQUEST)]


def test_a_prompt_in_pieces_opens_when_it_is_whole_and_a_piece_out_of_order_is_ignored(loop, link, strategy):
    sink = link(1)
    loop.deliver(1, [opening(7, 3, offset=0, prompt_len=6)])
    loop.deliver(1, [opening(7, 2, offset=4, prompt_len=6)])
    loop.deliver(1, [opening(7, 3, offset=3, prompt_len=6)])
    assert sink.next() == [Proposals(7, 6, [], ProposalStatus.READY)]
    assert strategy.calls.count(("open", (1, 7))) == 1


def test_a_prompt_in_pieces_is_drafted_as_its_first_piece_says(loop, link, strategy):
    sink = link(1)
    loop.deliver(1, [opening(7, 2, offset=4, prompt_len=6)])
    loop.deliver(1, [opening(7, 4, prompt_len=6, sampling=BIASED)])
    loop.deliver(1, [opening(7, 2, offset=4, prompt_len=6), opening(8, 3)])
    sink.next()
    sink.next()
    assert strategy.samplings == {(1, 7): BIASED, (1, 8): DraftSampling()}


def test_q_goes_with_the_drafts(loop, link, strategy):
    strategy.q = SparseQ(np.array([[4, 1], [0, 2]], np.int32), np.array([[0.5, 0.5], [1.0, 0.0]], np.float32))
    sink = link(1)
    loop.deliver(1, [opening(7, 3, sampling=BIASED)])
    assert sink.next() == [Proposals(7, 3, [], ProposalStatus.READY)]
    loop.deliver(1, [Commit(7, 3, [9])])
    assert sink.next() == [Proposals(7, 4, [4, 0], q=strategy.q)]


def test_a_prefill_that_ends_answers_the_commit_that_had_to_wait(loop, link):
    sink = link(1)
    loop.deliver(1, [opening(7, 300), Commit(7, 300, [1])])
    assert sink.next() == [Proposals(7, 301, [], ProposalStatus.NOT_READY)]
    assert sink.next() == [Proposals(7, 301, [], ProposalStatus.READY)]
    assert sink.next() == [Proposals(7, 301, [301, 0])]


def test_prefill_does_not_starve_under_commits_and_commits_do_not_wait_for_it(loop, link, strategy):
    sink = link(1)
    loop.deliver(1, [opening(1, 3)])
    sink.next()
    strategy.calls.clear()
    loop.deliver(1, [opening(2, 1000)])
    length = 3
    ready = False
    while not ready:
        loop.deliver(1, [Commit(1, length, [0])])
        length += 1
        drafted = False
        while not drafted:
            for proposal in sink.next():
                ready |= proposal.status is ProposalStatus.READY
                drafted |= proposal.request == 1
    between = "".join({"draft": "d", "prefill": "p"}.get(call, "") for call, _ in strategy.calls).strip("d")
    assert between.count("p") == 10
    assert length < 1000


def test_closing_and_detaching_forget_sequences_and_stay_quiet(loop, link, strategy):
    first, second = link(1), link(2)
    loop.deliver(1, [opening(1, 3), opening(2, 3), opening(3, 3, prompt_len=9)])
    loop.deliver(2, [opening(1, 3)])
    first.next(), first.next(), second.next()
    loop.deliver(1, [Close(2, CloseReason.FINISHED)])
    loop.deliver(1, [Commit(1, 3, [1])])
    first.next()
    assert strategy.lengths.keys() == {(1, 1), (2, 1)}
    loop.detach(1)
    loop.deliver(1, [Commit(1, 4, [1])])
    loop.deliver(2, [Commit(1, 3, [1])])
    second.next()
    assert strategy.lengths.keys() == {(2, 1)}
    assert first.answers.empty()
    usage = loop.usage()
    assert (usage["num_sequences"], usage["links"]) == (1, 1)


def test_a_sequence_closed_while_its_commit_is_due_is_not_drafted(loop, link, strategy):
    sink = link(1)
    loop.deliver(1, [opening(1, 3)])
    sink.next()
    loop.deliver(1, [Commit(1, 3, [1]), Close(1, CloseReason.ABORTED)])
    loop.deliver(1, [opening(2, 3)])
    sink.next()
    assert not any(call == "draft" for call, _ in strategy.calls)


def test_a_strategy_s_exception_ends_the_loop():
    strategy = FakeStrategy()
    strategy.draft = lambda keys: 1 / 0
    loop, sink = DraftLoop(strategy), Sink()
    loop.attach(1, sink)
    loop.deliver(1, [opening(1, 3), Commit(1, 3, [1])])
    with pytest.raises(ZeroDivisionError):
        loop.run()
