"""Drafters and one trainer: all of a pool come to draft with the same version. Engine, link and target are played."""

import pytest
import torch

from outrider.actors.drafter.learning import LearningMember
from outrider.actors.learning.service import VersionServer
from outrider.cluster.link.messages import Close, CloseReason, Commit
from tests.unit.drafter.test_learning_member import Drafting, lesson, opening
from tests.unit.learning.tiny_learner import learner, many, serve, work

pytestmark = pytest.mark.timeout(300)


class TrainerClient:
    """The trainer but for its process and its own clock."""

    def __init__(self):
        self.learner = learner()
        self._hand_out = VersionServer(self.learner, "base", lambda tensors: tensors)

    def exchange(self, report, taught):
        return self._hand_out.exchange(report, taught)

    def fetch(self, update):
        return update.tensors[0]

    def base(self):
        return "base"

    def go_back(self, number):
        return self.learner.go_back(number), ""


def test_two_drafters_of_a_pool_come_to_the_same_version():
    teacher = TrainerClient()
    pool = [Drafting(), Drafting()]
    for each in pool:
        each.member = LearningMember(teacher, each.loop, each.proposer)
        each.member.exchange()
        assert not each.engine.loaded, "the drafter as it was loaded is what it has"

    def drafts_with(each):
        each.member.exchange()
        each.work_off()
        return each.member.status()["version"], each.engine.loaded[-1]

    def all_have(number):
        serving = teacher.learner.serving
        assert serving.number == number
        for each in pool:
            drafted, tensors = drafts_with(each)
            assert drafted == number
            assert tensors.keys() == serving.tensors.keys()
            assert all(torch.equal(tensor, serving.tensors[name]) for name, tensor in tensors.items())

    # What one of them hears is learned for both.
    texts = teacher.learner.figures()["texts"]
    pool[1].hear(opening(), Commit(7, 3, [10], 0, 0), lesson(3), Close(7, CloseReason.FINISHED))
    pool[1].member.exchange()
    assert teacher.learner.figures()["texts"] == texts + 1
    teacher.learner.add(many())
    while teacher.learner.serving.number < 1:
        work(teacher.learner, 25)
    assert drafts_with(pool[0])[0] == 1, "the other one has not asked yet"
    serve(teacher.learner)
    all_have(2)
    assert [len(each.engine.loaded) for each in pool] == [2, 1]
    # One of them is told to go back; one more comes to the pool.
    assert pool[0].member.go_back(1) == (3, "")
    pool.append(Drafting())
    pool[2].member = LearningMember(teacher, pool[2].loop, pool[2].proposer)
    all_have(3)
    work_done = teacher.learner.figures()["steps"]
    all_have(3)
    assert [len(each.engine.loaded) for each in pool] == [3, 2, 1]
    assert teacher.learner.figures()["steps"] == work_done
