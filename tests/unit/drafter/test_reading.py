"""Prompts are read in pieces, beside everything else: nobody's commit waits for another sequence's prompt."""

import threading

import pytest

from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramIndex, NgramProposer
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixIndex, SuffixLimits
from outrider.cluster.link.messages import (
    Close,
    CloseReason,
    Commit,
    DraftOrigin,
    DraftSampling,
    Open,
    ProposalStatus,
)
from tests.unit.drafter.draft_bench import KEY
from tests.unit.drafter.drive import Drive, Told
from tests.unit.drafter.scripted_proposer import SOON_S, Sink

pytestmark = pytest.mark.timeout(300)

SLOW = 999
"""A token that is not read before the test allows it."""

LONG = [token % 50 for token in range(5000)]

STRATEGIES = {
    "ngram": lambda: NgramProposer(2, 4),
    "suffix": lambda: SuffixProposer(SuffixLimits(24, 1.0, 0.1), 10, 4096),
}


@pytest.fixture
def gate(monkeypatch):
    """reading: somebody has come to SLOW. go_on: it may be read."""

    class Gate:
        reading, go_on = threading.Event(), threading.Event()

    for index, method in ((NgramIndex, "append"), (SuffixIndex, "append")):
        plain = getattr(index, method)

        def read(self, token_ids, plain=plain):
            if SLOW in token_ids:
                Gate.reading.set()
                assert Gate.go_on.wait(2 * SOON_S)
            plain(self, token_ids)

        monkeypatch.setattr(index, method, read)
    yield Gate
    Gate.go_on.set()


@pytest.mark.parametrize("proposer", STRATEGIES)
def test_commits_are_taken_while_a_prompt_is_read(gate, proposer):
    loop, sinks = DraftLoop(STRATEGIES[proposer]()), {1: Sink(), 2: Sink()}
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    for link, sink in sinks.items():
        loop.attach(link, sink)
        loop.deliver(link, [Open(1, [1, 2, 3, 4, 1, 2], 4, DraftSampling())])
        assert sink.next()[0].status is ProposalStatus.READY
    prompt = [*LONG[:2100], SLOW, 1, 2]
    taken = []

    def deliver():
        loop.deliver(1, [Open(2, prompt, 4, DraftSampling())])
        for link in sinks:  # the reader's own link is no exception
            loop.deliver(link, [Commit(1, 6, [3], 2, 2)])
        loop.deliver(1, [Commit(2, len(prompt), [1], 2, 2)])
        taken.append(True)

    delivering = threading.Thread(target=deliver, daemon=True)
    delivering.start()
    try:
        assert gate.reading.wait(SOON_S)
        delivering.join(SOON_S)
        assert taken, "commits wait for a prompt that is not theirs"
        assert sinks[2].next()[0].token_ids == [4, 1]
    finally:
        gate.go_on.set()
    answers = []
    while not any(answer.request == 2 and answer.status is ProposalStatus.OK for answer in answers):
        answers += sinks[1].next()
    assert [a.status for a in answers if a.request == 2][-2:] == [ProposalStatus.READY, ProposalStatus.OK]
    assert answers[-1].base_committed_len == len(prompt) + 1
    loop.deliver(1, [Close(2, CloseReason.FINISHED)])
    loop.stop()
    running.join(SOON_S)
    assert not running.is_alive()


@pytest.mark.parametrize("proposer", STRATEGIES)
def test_a_prompt_and_what_was_committed_meanwhile_are_one_text(proposer):
    proposer = Drive(STRATEGIES[proposer]())
    assert proposer.open(KEY, [*LONG, 700, 701, 702], 4, DraftSampling()) is None
    assert proposer.usage()["num_prefilling"] == 1
    first = proposer.commit(KEY, Commit(1, 5003, [5], 1, 1))
    assert first == [Told(KEY, 5004, [], ProposalStatus.NOT_READY)]
    assert proposer.commit(KEY, Commit(1, 5004, [700, 701], 2, 2))[0].status is ProposalStatus.NOT_READY
    assert proposer.work_off() == [
        Told(KEY, 5006, [], ProposalStatus.READY),
        Told(KEY, 5006, [702, 5], ProposalStatus.OK, origin=DraftOrigin.MAIN_LINE),
    ]
    assert proposer.commit(KEY, Commit(1, 5006, [702], 1, 1))[0].token_ids == [5]
    assert proposer.usage()["num_prefilling"] == 0


@pytest.mark.parametrize(("proposer", "pieces"), [("ngram", 19), ("suffix", 4)])
def test_what_is_committed_while_the_last_piece_is_read_is_read_too(proposer, pieces):
    proposer = Drive(STRATEGIES[proposer]())
    proposer.open(KEY, [*LONG, 700, 701, 702], 4, DraftSampling())
    answers, base = [], 5003
    while not any(answer.status is ProposalStatus.READY for answer in answers):
        work, _ = proposer.plan()
        work.execute()
        if base < 5003 + pieces:
            proposer.commit(KEY, Commit(1, base, [base + 1000], 1, 1))
            base += 1
        answers = proposer.complete(work)
    answer = proposer.commit(KEY, Commit(1, base, [700, 701, 702], 2, 2))[0]
    assert answer.token_ids == [6003, 6004]


@pytest.mark.parametrize("proposer", STRATEGIES)
def test_a_prompt_that_is_closed_half_read_is_forgotten(proposer):
    proposer = Drive(STRATEGIES[proposer]())
    proposer.open(KEY, list(LONG), 4, DraftSampling())
    work, _ = proposer.plan()
    proposer.close(KEY)
    work.execute()
    assert proposer.complete(work) == []
    assert proposer.plan() == (None, [])
    assert proposer.usage() == {"num_sequences": 0, "num_prefilling": 0, "kv_cache_usage": 0.0}


def test_a_sequence_opened_again_while_its_former_life_is_read_is_read_anew():
    proposer = Drive(NgramProposer(2, 4))
    proposer.open(KEY, [*LONG, 1], 4, DraftSampling())
    work, _ = proposer.plan()
    proposer.close(KEY)
    proposer.open(KEY, [*LONG, 2], 4, DraftSampling())
    work.execute()
    assert proposer.complete(work) == []
    assert proposer.work_off() == [Told(KEY, 5001, [], ProposalStatus.READY)]
