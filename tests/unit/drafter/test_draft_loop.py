"""The drafter's loop over a scripted proposer: what is at hand leaves at once, what is not takes a step."""

import threading

import numpy as np
import pytest

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.hang_watch import HangWatch
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramProposer
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.cluster.link.messages import (
    Close,
    CloseReason,
    Commit,
    DraftOrigin,
    DraftSampling,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode
from tests.support.clock import Clock
from tests.unit.drafter.scripted_proposer import FORESEEN, SOON_S, FakeProposer, Sink
from tests.unit.drafting_engine import MemoryEngine, lookahead

pytestmark = pytest.mark.timeout(300)

BIASED = DraftSampling(Mode.REJECTION, temperature=1.0, biases=((1, 2.0),))


@pytest.fixture
def proposer():
    return FakeProposer()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def loop(proposer, clock):
    loop = DraftLoop(proposer, clock)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    yield loop
    proposer.gate.set()
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


def opening(request, tokens, sampling=DraftSampling(), name=""):  # noqa: B008
    return Open(request, list(range(tokens)), 4, sampling, name)


def commit(request, base, token=1, k=4):
    return Commit(request, base, [token], k, k)


def proposal(request, length, origin=DraftOrigin.MISS, q=None):
    return Proposals(request, length, [length, 0], q=q, origin=origin, step_us=1234)


def ready(request, length):
    return Proposals(request, length, [], ProposalStatus.READY, step_us=1234)


def test_open_commit_propose(loop, link, proposer, clock):
    sink = link(1)
    loop.deliver(1, [opening(7, 3)])
    assert sink.next() == [ready(7, 3)]
    proposer.gate.clear()
    loop.deliver(1, [commit(7, 3)])
    assert proposer.working.wait(SOON_S)
    clock.now = 0.25
    proposer.gate.set()
    answers, work_us = sink.answers.get(timeout=SOON_S)
    assert answers == [proposal(7, 4)]
    assert work_us == 250_000, "what the target waited for"


def test_what_was_drafted_ahead_leaves_while_a_step_runs(loop, link, proposer):
    sink = link(1)
    loop.deliver(1, [opening(7, 3), opening(8, 5)])
    sink.next()
    proposer.gate.clear()
    loop.deliver(1, [commit(7, 3)])
    assert proposer.working.wait(SOON_S)
    loop.deliver(1, [commit(8, 5, FORESEEN)])
    answers, work_us = sink.answers.get(timeout=SOON_S)
    assert answers == [proposal(8, 6, DraftOrigin.MAIN_LINE)]
    assert work_us == 0
    proposer.gate.set()
    assert sink.next() == [proposal(7, 4)]


def test_requests_of_all_links_are_one_batch_and_each_link_gets_its_own_answers(loop, link, proposer):
    first, second = link(1), link(2)
    loop.deliver(1, [opening(7, 3), opening(8, 5)])
    loop.deliver(2, [opening(7, 4)])
    first.next(), second.next()
    proposer.gate.clear()
    loop.deliver(1, [commit(8, 5)])
    assert proposer.working.wait(SOON_S)
    loop.deliver(1, [commit(7, 3)])
    loop.deliver(2, [commit(7, 4)])
    proposer.gate.set()
    assert first.next() == [proposal(8, 6)]
    assert first.next() == [proposal(7, 4)]
    assert second.next() == [proposal(7, 5)]
    assert [[sequence.key for sequence in batch] for batch in proposer.batches] == [[(1, 8)], [(1, 7), (2, 7)]]


def test_the_answers_of_one_delivery_are_one_frame(loop, link):
    sink = link(1)
    loop.deliver(1, [opening(7, 3), opening(8, 5)])
    assert sink.next() == [ready(7, 3), ready(8, 5)]
    loop.deliver(1, [commit(7, 3, FORESEEN), commit(8, 5, FORESEEN)])
    assert sink.next() == [proposal(7, 4, DraftOrigin.MAIN_LINE), proposal(8, 6, DraftOrigin.MAIN_LINE)]


STRATEGIES = {
    "ngram": lambda: NgramProposer(2, 4),
    "suffix": lambda: SuffixProposer(SuffixLimits(24, 1.0, 0.1), 10, 4096),
    "draft_model": lambda: DraftModelProposer(MemoryEngine(), 64, lookahead()),
}


@pytest.mark.parametrize("proposer", STRATEGIES)
def test_whatever_the_method_a_commit_must_continue_an_open_sequence(proposer):
    loop, sink = DraftLoop(STRATEGIES[proposer]()), Sink()
    loop.attach(1, sink)
    loop.deliver(1, [commit(7, 0), opening(7, 3), commit(7, 2), commit(7, 4), commit(7, 3, k=0)])
    said = [(said.base_committed_len, said.status) for said in sink.next()]
    unknown, ready = ProposalStatus.UNKNOWN_REQUEST, ProposalStatus.READY
    assert said == [(0, unknown), (3, ready), (2, unknown), (4, unknown)]
    loop.deliver(1, [commit(7, 3), commit(7, 4, k=0), commit(8, 0)])
    said = [(said.request, said.base_committed_len, said.status) for said in sink.next()]
    assert said == [(7, 3, unknown), (8, 0, unknown)]
    assert loop.sequences[1, 7].committed_len == 5


def test_a_sequence_is_opened_once_with_its_name_and_its_sampling(loop, link, proposer):
    sink = link(1)
    loop.deliver(1, [opening(7, 3, BIASED, "mine"), opening(7, 2), opening(8, 3)])
    assert sink.next() == [ready(7, 3), ready(8, 3)]
    assert proposer.opened == [(1, 7), (1, 8)]
    assert proposer.samplings == {(1, 7): BIASED, (1, 8): DraftSampling()}
    assert (loop.sequences[1, 7].name, loop.sequences[1, 7].text) == ("mine", [0, 1, 2])


def test_q_goes_with_the_drafts(loop, link, proposer):
    proposer.q = SparseQ(np.array([[4, 1], [0, 2]], np.int32), np.array([[0.5, 0.5], [1.0, 0.0]], np.float32))
    sink = link(1)
    loop.deliver(1, [opening(7, 3, BIASED)])
    sink.next()
    loop.deliver(1, [commit(7, 3)])
    assert sink.next() == [proposal(7, 4, q=proposer.q)]


def test_closing_and_detaching_forget_sequences_and_stay_quiet(loop, link, proposer):
    first, second = link(1), link(2)
    loop.deliver(1, [opening(1, 3), opening(2, 3)])
    loop.deliver(2, [opening(1, 3)])
    first.next(), second.next()
    loop.deliver(1, [Close(2, CloseReason.FINISHED)])
    loop.deliver(1, [commit(1, 3)])
    first.next()
    assert proposer.open_sequences.keys() == {(1, 1), (2, 1)}
    loop.detach(1)
    loop.deliver(1, [commit(1, 4)])
    loop.deliver(2, [commit(1, 3)])
    second.next()
    assert proposer.open_sequences.keys() == {(2, 1)}
    assert first.answers.empty()
    usage = loop.metrics()
    assert (usage["num_sequences"], usage["links"]) == (1, 1)


def test_a_sequence_closed_while_its_commit_is_due_is_not_answered(loop, link, proposer):
    sink = link(1)
    loop.deliver(1, [opening(1, 3)])
    sink.next()
    proposer.gate.clear()
    loop.deliver(1, [commit(1, 3)])
    assert proposer.working.wait(SOON_S)
    loop.deliver(1, [Close(1, CloseReason.ABORTED)])
    proposer.gate.set()
    loop.deliver(1, [opening(2, 3)])
    assert sink.next() == [ready(2, 3)]
    assert sink.answers.empty()


def test_a_proposer_s_exception_ends_the_loop():
    proposer = FakeProposer()
    proposer.execute = lambda: 1 / 0
    loop, sink = DraftLoop(proposer), Sink()
    loop.attach(1, sink)
    loop.deliver(1, [opening(1, 3), commit(1, 3)])
    with pytest.raises(ZeroDivisionError):
        loop.run()


def hangs(loop):
    watch = HangWatch(patience_ticks=3)
    return any(watch.tick(loop.at_work()) for _ in range(5))


def test_a_step_that_does_not_end_is_a_hang(loop, link, proposer):
    sink = link(1)
    loop.deliver(1, [opening(1, 3)])
    sink.next()
    proposer.gate.clear()
    loop.deliver(1, [commit(1, 3)])
    assert proposer.working.wait(SOON_S)
    assert hangs(loop)
    proposer.gate.set()
    sink.next()
    while loop.at_work():
        pass
    assert not hangs(loop)


def test_messages_that_wait_for_the_lock_are_a_hang(proposer):
    loop = DraftLoop(proposer)
    loop.attach(1, Sink())
    loop.attach(2, Sink())
    entered, leave = threading.Event(), threading.Event()

    def stuck(*_):
        entered.set()
        leave.wait(SOON_S)

    proposer.open = stuck
    threads = [threading.Thread(target=loop.deliver, args=(link, [opening(1, 3)])) for link in (1, 2)]
    for thread in threads:
        thread.start()
    assert entered.wait(SOON_S)
    assert hangs(loop)
    leave.set()
    for thread in threads:
        thread.join(SOON_S)
    assert not loop.at_work()
