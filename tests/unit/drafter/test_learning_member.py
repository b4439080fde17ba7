"""A drafter's side of learning: what it hands over, and which version it takes. The trainer is played here."""

import numpy as np
import pytest
import torch

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.learning import LearningMember
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.learning.service import Update
from outrider.actors.learning.training_samples import SampleCollector
from outrider.cluster.link.messages import Close, CloseReason, Commit, DraftSampling, Open, TrainingSample
from outrider.cluster.modes import Mode
from tests.unit.drafter.scripted_proposer import Sink
from tests.unit.drafting_engine import MemoryEngine, lookahead

LINK = 1
BASE = "the drafter's own checkpoint"


class PlayedTrainer:
    def __init__(self):
        self.version, self.weights, self.learned_from = ("t1", 0), {}, BASE
        self.fetched = 0
        self.heard, self.held = [], []
        self.fails = False

    def exchange(self, report, texts):
        self.refused = report.refused
        if self.fails:
            raise ConnectionError("gone")
        held = report.held
        self.held.append(held)
        self.heard += texts
        new = held != self.version and not (held is None and self.version[1] == 0)
        return Update(self.version, self.learned_from, {"steps": 1}, [self.weights] if new else [])

    def fetch(self, update):
        self.fetched += 1
        return update.tensors[0]

    def base(self):
        return BASE

    def as_loaded(self, names):
        return {name: torch.zeros(2) for name in names}

    def go_back(self, number):
        self.version, self.weights = ("t1", self.version[1] + 1), {"w": torch.full((2,), float(number))}
        return self.version[1], ""


class Drafting:
    """A drafter but for its process: loop, proposer and member, driven by hand."""

    def __init__(self):
        self.engine = MemoryEngine()
        self.proposer = DraftModelProposer(self.engine, 64, lookahead())
        self.loop = DraftLoop(self.proposer, training_samples=SampleCollector())
        self.sink = Sink()
        self.loop.attach(LINK, self.sink)
        self.trainer = PlayedTrainer()
        self.member = LearningMember(self.trainer, self.loop, self.proposer)

    def hear(self, *messages):
        self.loop.deliver(LINK, messages)

    def work_off(self):
        while (work := self.proposer.plan()) is not None:
            work.execute()
            self.proposer.complete(work)


@pytest.fixture
def drafting():
    return Drafting()


def lesson(position, rows=1, request=7):
    ids = np.array([[10 + row, 500] for row in range(rows)], np.int32)
    return TrainingSample(request, position, ids, np.full(ids.shape, -1.0, np.float16))


def opening(request=7, **sampling):
    return Open(request, [1, 2, 3], 4, DraftSampling(**sampling))


@pytest.mark.parametrize(
    ("sampling", "greedy"), [({}, True), ({"mode": Mode.COUPLED, "temperature": 0.7}, False)], ids=["greedy", "drawn"]
)
def test_what_was_taught_is_handed_over_once_when_a_request_ends(drafting, sampling, greedy):
    drafting.hear(opening(**sampling), Commit(7, 3, [10], 0, 0), lesson(3))
    drafting.hear(Commit(7, 4, [10, 11], 0, 0), lesson(4, rows=2))
    drafting.member.exchange()
    assert drafting.trainer.heard == []
    drafting.hear(Close(7, CloseReason.FINISHED))
    drafting.member.exchange()
    drafting.member.exchange()
    (part,) = drafting.trainer.heard
    assert part.ids.tolist() == [1, 2, 3, 10, 10, 11]
    assert (part.start, part.sample == 0) == (3, greedy)


def test_a_lesson_about_nobody_changes_nothing(drafting):
    drafting.hear(lesson(3), opening(), lesson(3), lesson(9), Close(7, CloseReason.ABORTED), lesson(3))
    drafting.member.exchange()
    assert drafting.trainer.heard == []


def test_a_link_that_ends_gives_what_it_had(drafting):
    drafting.hear(opening(), Commit(7, 3, [10], 0, 0), lesson(3))
    drafting.loop.detach(LINK)
    drafting.member.exchange()
    assert len(drafting.trainer.heard) == 1


def test_a_version_is_taken_between_two_steps_and_once(drafting):
    drafting.member.exchange()
    assert drafting.engine.loaded == [], "version 0 is what it has"
    drafting.trainer.version, drafting.trainer.weights = ("t1", 1), {"w": torch.ones(2)}
    drafting.member.exchange()
    assert drafting.engine.loaded == []
    drafting.work_off()
    assert drafting.engine.loaded == [{"w": drafting.trainer.weights["w"]}]
    drafting.member.exchange()
    drafting.work_off()
    assert len(drafting.engine.loaded) == 1
    assert drafting.trainer.held == [None, ("t1", 0), ("t1", 1)]
    assert drafting.member.status()["version"] == 1


def test_a_trainer_that_began_anew_is_followed(drafting):
    drafting.trainer.version, drafting.trainer.weights = ("t1", 3), {"w": torch.ones(2)}
    drafting.member.exchange()
    drafting.trainer.fails = True
    drafting.member.exchange()
    drafting.work_off()
    assert drafting.member.failures == 1
    drafting.trainer.fails = False
    drafting.trainer.version, drafting.trainer.weights = ("t2", 0), {"w": torch.zeros(2)}
    drafting.member.exchange()
    drafting.work_off()
    assert [float(loaded["w"][0]) for loaded in drafting.engine.loaded] == [1.0, 0.0]
    assert drafting.member.status()["version"] == 0


@pytest.mark.parametrize("bad", [{}, {"w": torch.tensor([1.0, float("nan")])}, {"w": torch.tensor([float("inf")])}])
def test_a_version_that_cannot_be_is_refused(drafting, bad):
    drafting.trainer.version, drafting.trainer.weights = ("t1", 1), bad
    drafting.member.exchange()
    drafting.member.exchange()
    drafting.work_off()
    assert drafting.engine.loaded == []
    assert drafting.member.refused == 1
    assert drafting.member.status()["version"] == 0, "what drafts, not what was offered"


def test_a_version_that_was_learned_from_another_checkpoint_is_refused(drafting, caplog):
    """It has the same shapes, would load, and draft what nobody accepts. It is not even fetched."""
    trainer, member = drafting.trainer, drafting.member
    trainer.learned_from = "another target's drafter"
    for number in (1, 2):
        trainer.version, trainer.weights = ("t1", number), {"w": torch.full((2,), float(number))}
        member.exchange()
        member.exchange()
        drafting.work_off()
        assert trainer.held[-1] == ("t1", number), "it has been dealt with"
    assert (drafting.engine.loaded, trainer.fetched) == ([], 0)
    assert (member.refused, member.failures, member.status()["version"]) == (2, 0, 0)
    assert trainer.refused == ("t1", 2)
    lines = [record.getMessage() for record in caplog.records if "another checkpoint" in record.getMessage()]
    assert [line.startswith("drafter.model: ") for line in lines] == [True, True]
    trainer.version, trainer.learned_from = ("t2", 1), BASE
    member.exchange()
    drafting.work_off()
    assert (member.refused, member.status()["version"], len(drafting.engine.loaded)) == (2, 1, 1)


class Choosy(MemoryEngine):
    """Takes no version of these numbers."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = numbers

    def load_weights(self, tensors):
        super().load_weights(tensors)
        if float(tensors["w"][0]) in self.numbers:
            raise RuntimeError("out of memory")


def choosy(*numbers):
    made = Drafting()
    made.proposer._engine = made.engine = Choosy(*numbers)
    return made


@pytest.mark.parametrize("first", [0.0, 1.0], ids=["as it was loaded", "a version"])
def test_what_cannot_be_loaded_leaves_what_was_there_before(first):
    drafting = choosy(2.0)
    for number in (1, 2, 2, 3) if first else (2, 2, 3):
        drafting.trainer.version, drafting.trainer.weights = ("t1", number), {"w": torch.full((2,), float(number))}
        drafting.member.exchange()
        drafting.work_off()
    loaded = [float(each["w"][0]) for each in drafting.engine.loaded]
    assert loaded == ([1.0, 2.0, 1.0, 3.0] if first else [2.0, 0.0, 3.0]), (
        "not offered again, and the next one is taken"
    )
    status = drafting.member.status()
    assert (status["version"], status["refused"], status["changes"]) == (3, 1, 2 if first else 1)
    assert drafting.trainer.refused == ("t1", 2)


def test_a_drafter_that_cannot_go_back_either_ends():
    drafting = choosy(2.0, 0.0)
    drafting.trainer.version, drafting.trainer.weights = ("t1", 2), {"w": torch.full((2,), 2.0)}
    drafting.member.exchange()
    with pytest.raises(RuntimeError, match="out of memory"):
        drafting.work_off()
