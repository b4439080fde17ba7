"""Times of rounds as metrics have them, and the names that a drafter's log gets."""

import logging

import pytest

from outrider.actors.drafter.draft_model import DraftModelStrategy
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.observability.logs import REQUEST_ID_KEY
from outrider.actors.observability.sequence_names import NAMES
from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.link.messages import Close, CloseReason, DraftSampling, Name, Open
from tests.unit.drafting_engine import MemoryEngine


def test_times_fill_a_histogram_each_in_seconds():
    statistics = RoundStatistics()
    statistics.add_times(RoundTimes(period_ms=50.0, target_ms=30.0, draft_ms=10.0, wait_ms=12.0))
    statistics.add_times(RoundTimes(period_ms=70.0, target_ms=30.0, draft_ms=10.0, wait_ms=0.0))
    sums = {part: histogram["sum"] for part, histogram in statistics.histograms().items()}
    assert sums == pytest.approx({"period": 0.12, "target": 0.06, "draft": 0.02, "wait": 0.012})
    assert all(sum(histogram["counts"]) == 2 for histogram in statistics.histograms().values())


class Sink:
    def send(self, proposals, work_us): ...


def test_a_drafter_s_line_about_a_sequence_has_the_client_s_id(caplog):
    loop = DraftLoop(DraftModelStrategy(MemoryEngine(), 8))
    loop.attach(1, Sink())
    opening = {"num_speculative_tokens": 4, "sampling": DraftSampling()}
    with caplog.at_level(logging.WARNING):
        loop.deliver(1, [Name(7, "mine-0a1b2c3d"), Open(7, 9, 4, [1], **opening), Open(8, 9, 4, [1], **opening)])
    loop.detach(1)
    named, nameless = caplog.records
    assert getattr(named, REQUEST_ID_KEY) == "mine"
    assert not hasattr(nameless, REQUEST_ID_KEY)


@pytest.mark.parametrize("end", ["close", "detach"])
def test_names_go_with_their_sequences(end):
    before = len(NAMES)
    loop = DraftLoop(DraftModelStrategy(MemoryEngine(), 8))
    loop.attach(1, Sink())
    loop.deliver(1, [Name(7, "mine")])
    assert len(NAMES) == before + 1
    if end == "close":
        loop.deliver(1, [Close(7, CloseReason.FINISHED)])
    else:
        loop.detach(1)
    assert len(NAMES) == before
