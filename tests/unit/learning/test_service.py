"""The trainer's process but for Ray: what it keeps on disk, and the general texts that it reads."""

import asyncio

import pytest
import torch

from outrider.actors.learning.service import DrafterTrainer, HandOut, OnDisk, Report, general_texts, life_s
from outrider.actors.learning.text import Text
from outrider.actors.shared_actor import IDLE_LIFE_S, IdleLife
from outrider.cluster.learning_config import LearningConfig
from outrider.deploy.distill.texts import Job, TextStore
from tests.unit.learning.test_learner import learner


class PlayedStore:
    def __init__(self, fails=False):
        self.saved, self.left, self.fails = [], [], fails

    def save(self, number, tensors, figures):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.saved.append(number)

    def leave(self, number, serving):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.left.append((number, serving))


def trainer(made, store):
    """Without what its process loads at the start."""
    one = object.__new__(DrafterTrainer)
    one._learner, one._life, one._on_disk = made, IdleLife(), OnDisk(made, store)
    return one


def served(made, count):
    for _ in range(count):
        serving = made.serving
        with made._lock:
            made._publish({name: tensor + 1 for name, tensor in serving.tensors.items()}, None, serving)


@pytest.mark.parametrize("fails", [False, True])
def test_a_way_back_is_on_disk_before_it_is_answered(fails):
    made = learner()
    store = PlayedStore(fails)
    one = trainer(made, store)
    served(made, 3)
    assert asyncio.run(one.go_back(1)) == (4, "")
    assert store.left == ([] if fails else [(1, 4)])
    assert one._on_disk.failures == fails
    assert asyncio.run(one.go_back(9))[0] is None
    assert len(store.left) == (not fails)


def test_what_serves_is_written_once():
    made, store = learner(), PlayedStore()
    kept = OnDisk(made, store)
    kept.save()
    served(made, 1)
    kept.save()
    kept.save()
    assert store.saved == [1]
    OnDisk(made, None).save()


def text(*ids):
    tops = torch.zeros(len(ids) - 1, 4)
    return Text(0, 0, torch.tensor(ids), 1, tops.long(), tops)


def test_general_texts_that_are_not_there_are_an_error_with_the_field(tmp_path):
    """Else they would protect nothing, and nobody would know."""
    assert general_texts(None, 384, 100) == []
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"drafter\.learn\.general: .* it has no batch-"):
            general_texts(str(directory), 384, 100)


def test_of_general_texts_those_count_that_the_drafter_can_read(tmp_path):
    TextStore(tmp_path).save(Job(0, 0, (0, 1, 2)), [text(1, 2, 3), text(1, 100, 3), text(*range(50))])
    assert [each.ids.tolist() for each in general_texts(str(tmp_path), 49, 100)] == [[1, 2, 3]]
    with pytest.raises(FileNotFoundError, match="none of its 1 files holds a text that fits"):
        general_texts(str(tmp_path), 49, 3)


def test_a_trainer_outlives_a_sole_drafter_s_restart_where_its_memory_is_all_there_is():
    assert life_s(LearningConfig()) == 1800
    assert life_s(LearningConfig(directory="/versions")) == IDLE_LIFE_S
    assert IdleLife(life_s(LearningConfig()))._idle_life_s == 1800


class Drafters:
    """Of one trainer, as far as it hears of them."""

    def __init__(self):
        self.learner = learner()
        served(self.learner, 1)
        self._hand_out = HandOut(self.learner, lambda tensors: tensors)

    def offered(self, life, held=None, refused=None, drafter="one"):
        """Number of the version that is given to it; None: none is."""
        update = self._hand_out.exchange(Report(drafter, life, held, refused), [])
        return update.version[1] if update.tensors else None

    @property
    def version(self):
        return self.learner.serving.version.learner, self.learner.serving.version.number


def test_a_version_that_ends_a_drafter_time_and_again_is_not_given_to_it_again():
    drafters = Drafters()
    assert [drafters.offered("a"), drafters.offered("a")] == [1, 1], "it may still be loading"
    assert drafters.offered("b") == 1, "once may have had any reason"
    assert drafters.offered("c") is None
    assert drafters.offered("c", held=drafters.version) is None
    assert drafters.offered("x", drafter="another") == 1
    served(drafters.learner, 1)
    assert drafters.offered("c", held=("t", 1)) == 2


def test_a_drafter_that_ends_when_it_has_the_version_is_given_it_again():
    drafters = Drafters()
    for life in "abcdef":
        assert drafters.offered(life) == 1
        assert drafters.offered(life, held=drafters.version) is None


def test_a_version_that_a_drafter_could_not_load_is_not_given_to_it_again():
    drafters = Drafters()
    assert drafters.offered("a") == 1
    assert drafters.offered("a", held=drafters.version, refused=drafters.version) is None
    assert drafters.offered("b") is None
    assert drafters.offered("b", drafter="another") == 1
    served(drafters.learner, 1)
    assert drafters.offered("b") == 2
