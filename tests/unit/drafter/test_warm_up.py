"""What is drafted before a drafter serves: all that may be compiled for it."""

from __future__ import annotations

from typing import Any

from outrider.actors.drafter.load import warm_up
from outrider.actors.drafter.ngram import NgramStrategy
from outrider.cluster.modes import Mode
from tests.unit.drafter.test_several import SeveralBench


class Watched(NgramStrategy):
    def __init__(self) -> None:
        super().__init__(2, 4)
        self.opened: list[Any] = []

    def open(self, sequence: Any) -> None:
        self.opened.append(sequence.sampling)
        super().open(sequence)


def test_the_warm_up_covers_every_way_to_draw():
    """A threshold, noise and q with and without one, and so many tokens of q are kernels of their own; q is drawn the
    same in every mode that does."""
    warm_up(strategy := Watched(), draft_top_n=16)
    seen = {(sampling.mode, sampling.top_p < 1) for sampling in strategy.opened}
    assert {(mode, with_one) for mode in (Mode.REJECTION, Mode.COUPLED) for with_one in (False, True)} < seen
    assert (Mode.GREEDY, False) in seen
    assert {sampling.top_n for sampling in strategy.opened if sampling.mode is Mode.REJECTION} == {16}


def test_warming_up_is_no_round_of_the_judges() -> None:
    bench = SeveralBench()
    warm_up(bench.several, draft_top_n=64)
    assert bench.several.model.step_us() > 0
    assert set(bench.several.judge.chosen.values()) == {0}
