"""A swap of a draft model's weights costs a request a round at most. Loop and proposer are the real ones; engine, link
and target are played."""

import queue
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.loop import DraftLoop
from outrider.cluster.link.messages import Commit, DraftSampling, Open, Proposals, ProposalStatus
from tests.unit.drafter.scripted_proposer import SOON_S, Sink
from tests.unit.drafting_engine import VOCAB, MemoryEngine, continuation, lookahead

pytestmark = pytest.mark.timeout(300)


def load_number(number, load):
    load({"w": torch.full((2,), float(number))})


class SlowToLoad(MemoryEngine):
    """A version is loaded while the test says so."""

    def __init__(self):
        super().__init__()
        self.loading, self.loaded_now = threading.Event(), threading.Event()

    def load_weights(self, tensors):
        self.loading.set()
        assert self.loaded_now.wait(SOON_S)
        super().load_weights(tensors)


class Request:
    """A target's side of one. Where drafts are not there in time the round is without: the target goes on alone."""

    K = 4

    def __init__(self, loop, link_id):
        self.loop, self.link_id, self.sink = loop, link_id, Sink()
        self.text, self.drafts, self.without = [link_id, 2, 3], [], 0
        loop.attach(link_id, self.sink)
        loop.deliver(link_id, [Open(1, list(self.text), self.K, DraftSampling())])
        (ready,) = self.sink.next()
        assert ready.status is ProposalStatus.READY

    def round(self, *, misses, within_s=SOON_S):
        """misses: the target says something else than was drafted, and that nobody has foreseen."""
        taken = [] if misses else self.drafts
        token = VOCAB if misses else continuation([*self.text, *taken], 1)[0]
        base, self.drafts = len(self.text), []
        self.text += [*taken, token]
        self.loop.deliver(self.link_id, [Commit(1, base, [*taken, token], self.K, self.K)])
        with suppress(queue.Empty):
            while not self.drafts:
                answers, _ = self.sink.answers.get(timeout=within_s) if within_s else self.sink.answers.get_nowait()
                for answer in (each for each in answers if isinstance(each, Proposals)):  # it takes nothing ahead
                    if answer.status is ProposalStatus.OK and answer.base_committed_len == len(self.text):
                        self.drafts = list(answer.token_ids)
        self.without += not self.drafts


def at_rest(loop):
    """All that can be drafted ahead is."""
    end = time.monotonic() + SOON_S
    while loop._arrived or loop.at_work():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("misses", [False, True])
def test_a_swap_costs_each_request_one_round_at_most(misses):
    """A swap takes as long as a round of the target's here: what was drafted ahead is sent meanwhile."""
    engine = SlowToLoad()
    proposer = DraftModelProposer(engine, 64, lookahead())
    loop = DraftLoop(proposer)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        requests = [Request(loop, link_id) for link_id in (1, 2, 3)]
        for number in range(1, 4):
            for request in requests:
                request.round(misses=False)
            at_rest(loop)
            before = [request.without for request in requests]
            loop.change(partial(proposer.change_weights, partial(load_number, number)))
            assert engine.loading.wait(SOON_S)
            for request in requests:
                request.round(misses=misses, within_s=0.0)
            engine.loaded_now.set()
            for _ in range(4):
                for request in requests:
                    request.round(misses=misses)
            lost = [request.without - had for request, had in zip(requests, before, strict=True)]
            assert lost == [int(misses)] * 3
            engine.loading.clear()
            engine.loaded_now.clear()
        assert [float(loaded["w"][0]) for loaded in engine.loaded] == [1.0, 2.0, 3.0]
    finally:
        engine.loaded_now.set()
        loop.stop()
        thread.join(SOON_S)
    assert not thread.is_alive()
