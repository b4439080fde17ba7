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
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.ngram import NgramProposer
from outrider.cluster.modes import Mode
from tests.unit.drafter.scripted_proposer import SOON_S
from tests.unit.drafting_engine import VOCAB, MemoryEngine


class Watched(NgramProposer):
    def __init__(self) -> None:
        super().__init__(2, 4)
        self.opened: list[Any] = []

    def open(self, sequence: Any) -> None:
        self.opened.append(sequence.sampling)
        super().open(sequence)


def test_the_warm_up_covers_every_way_to_draw():
    """A threshold, noise and q with and without one, and so many tokens of q are kernels of their own; q is drawn the
    same in every mode that does."""
    warm_up(proposer := Watched(), draft_top_n=16)
    assert proposer.outbox.drain() == [], "nobody asked"
    seen = {(sampling.mode, sampling.top_p < 1) for sampling in proposer.opened}
    assert {(mode, with_one) for mode in (Mode.REJECTION, Mode.COUPLED) for with_one in (False, True)} < seen
    assert (Mode.GREEDY, False) in seen
    assert {sampling.top_n for sampling in proposer.opened if sampling.mode is Mode.REJECTION} == {16}


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


def test_a_drafter_warms_up_on_the_thread_of_its_steps_with_side_branches_and_copies_of_blocks() -> None:
    loop = DraftLoop(DraftModelProposer(engine := SureEngine(), 512))
    loop.start(lambda: warm_up(loop._proposer, draft_top_n=16), on_failure=pytest.fail)
    loop.stop()
    assert engine.threads == {"draft-loop"}
    assert any(plan.copies for plan in engine.plans)
    draws = [row.draws[0] for plan in engine.plans for row in plan.rows if row.draws]
    assert {one.sampling.mode for one in draws if one.alternatives} == {Mode.GREEDY, Mode.REJECTION, Mode.COUPLED}


def test_a_drafter_that_cannot_warm_up_fails_to_start() -> None:
    class Broken(Exception): ...

    def fail() -> None:
        raise Broken

    loop = DraftLoop(Watched())
    with pytest.raises(Broken):
        loop.start(fail, on_failure=pytest.fail)


def test_a_loop_that_fails_later_says_so() -> None:
    ended, loop = threading.Event(), DraftLoop(proposer := Watched())
    loop.start(lambda: None, ended.set)
    proposer.plan = lambda: [][0]
    loop.detach(0)
    assert ended.wait(SOON_S)
