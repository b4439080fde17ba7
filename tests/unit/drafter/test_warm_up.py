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
    """A threshold, and noise with and without one, are kernels of their own; q is drawn the same in every mode."""
    warm_up(strategy := Watched())
    seen = {(sampling.mode, sampling.top_p < 1) for sampling in strategy.opened}
    assert {(Mode.GREEDY, False), (Mode.REJECTION, True), (Mode.COUPLED, False), (Mode.COUPLED, True)} <= seen


def test_warming_up_is_no_round_of_the_judges() -> None:
    bench = SeveralBench()
    warm_up(bench.several)
    assert bench.several.model.step_us() > 0
    assert set(bench.several.judge.chosen.values()) == {0}
