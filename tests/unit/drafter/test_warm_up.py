"""What is drafted before a drafter serves: all that may be compiled for it, on the thread that will run its steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Drawn, StepPlan
from outrider.actors.drafter.load import warm_up
from outrider.actors.drafter.lookup_drafters import LookupDrafters
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramProposer
from outrider.actors.drafter.outcomes import USUAL_ACCEPTANCE
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.actors.drafter.vocabulary import DraftVocabulary
from outrider.cluster.modes import Mode
from tests.unit.drafter.scripted_proposer import SOON_S
from tests.unit.drafting_engine import VOCAB, MemoryEngine, lookahead


class SureEngine(MemoryEngine):
    """Gives one token nearly all of the probability. Tokens are drawn as those of any model are."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> list[Drawn | None]:
        self.threads.add(threading.current_thread().name)
        return super().run(plan)

    def _drawn(self, row: Any, one: Any, end: int) -> Drawn:
        return draw(torch.arange(VOCAB, 0.0, -1.0).unsqueeze(0) * 50.0, [one])[0]


def test_a_drafter_warms_up_in_every_way_on_the_thread_of_its_steps() -> None:
    """A threshold, noise and q with and without one, and so many tokens of q are kernels of their own; q is drawn the
    same in every mode that does."""
    loop = DraftLoop(DraftModelProposer(engine := SureEngine(), 512, lookahead()))
    loop.start(lambda: warm_up(loop._proposer, draft_top_n=16), on_failure=pytest.fail)
    loop.stop()
    assert engine.threads == {"draft-loop"}
    assert any(plan.copies for plan in engine.plans)
    draws = [row.draws[0] for plan in engine.plans for row in plan.rows if row.draws]
    seen = {(one.sampling.mode, one.sampling.top_p < 1) for one in draws if one.alternatives}
    sampled = {(mode, with_one) for mode in (Mode.REJECTION, Mode.COUPLED) for with_one in (False, True)}
    assert seen == {(Mode.GREEDY, False), *sampled}
    assert {one.sampling.top_n for one in draws if one.sampling.mode is Mode.REJECTION} == {16}


def test_the_warm_up_leaves_nothing_behind() -> None:
    """Neither tokens, answers and times that were counted, nor sequences of the engine."""
    vocabulary = DraftVocabulary(VOCAB, 20, at_first=range(100, 120))
    model = DraftModelProposer(engine := SureEngine(), 512, lookahead(), vocabulary=vocabulary)
    suffix = SuffixProposer(SuffixLimits(24, 1.0, 0.1), 10)
    before = [(each.counters(), each.usage(), each.step_us()) for each in (model, suffix)]
    for proposer in (model, suffix, LookupDrafters(model, {"suffix": suffix})):
        warm_up(proposer, draft_top_n=16)
    assert [(each.counters(), each.usage(), each.step_us()) for each in (model, suffix)] == before
    assert model._outcomes.usual_acceptance == USUAL_ACCEPTANCE
    assert vocabulary.token_ids == [*range(100, 120)]
    assert (len(engine.free), engine.committed) == (engine.num_blocks, {})


def test_a_drafter_that_cannot_warm_up_fails_to_start() -> None:
    class Broken(Exception): ...

    def fail() -> None:
        raise Broken

    loop = DraftLoop(NgramProposer(2, 4))
    with pytest.raises(Broken):
        loop.start(fail, on_failure=pytest.fail)


def test_a_loop_that_fails_later_says_so() -> None:
    ended, loop = threading.Event(), DraftLoop(proposer := NgramProposer(2, 4))
    loop.start(lambda: None, ended.set)
    proposer.plan = lambda: [][0]
    loop.detach(0)
    assert ended.wait(SOON_S)
