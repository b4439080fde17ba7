"""The trainer's process but for Ray: what it keeps on disk, and the general texts that it reads."""

import asyncio
import resource

import pytest
import torch

from outrider.actors.drafter.shared_actor import IDLE_LIFE_S, IdleLife
from outrider.actors.learning.service import (
    FORGOTTEN_S,
    LEAST_GENERAL,
    MOMENT_S,
    DrafterTrainer,
    HandOut,
    IdleTime,
    OnDisk,
    Report,
    general_texts,
    life_s,
)
from outrider.actors.learning.text import Text
from outrider.actors.learning.versions import VersionStore
from outrider.cluster.learning_config import LearningConfig
from outrider.deploy.distill.texts import Job, TextStore
from tests.clock import Clock
from tests.unit.learning.tiny_learner import drafter, learner, many, serve


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_way_back_is_on_disk_before_it_is_answered(fails):
    made = learner()
    store = PlayedStore(fails)
    one = trainer(made, store)
    for _ in range(3):
        serve(made)
    assert asyncio.run(one.go_back(1)) == (4, "")
    assert store.left == ([] if fails else [(1, 4)])
    assert one._on_disk.failures == fails
    assert asyncio.run(one.go_back(9))[0] is None
    assert len(store.left) == (not fails)


def test_what_serves_is_written_once():
    made, store = learner(), PlayedStore()
    kept = OnDisk(made, store)
    kept.save()
    serve(made)
    kept.save()
    kept.save()
    assert store.saved == [1]
    OnDisk(made, None).save()


def test_a_disk_that_is_full_while_it_learns_costs_the_copies_there_and_nothing_else(tmp_path):
    """The learner and the store are the real ones, and so is the limit on a file."""
    base, versions = tmp_path / "base", tmp_path / "versions"
    drafter().save_pretrained(base)
    made = learner()
    store = VersionStore(versions, base, kept=2)
    kept, hand_out = OnDisk(made, store), HandOut(made, "base", lambda tensors: tensors)
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((base / "model.safetensors").stat().st_size // 2, hard))
    try:
        made.add(many())
        while made.figures()["adopted"] < 2:
            assert made.turn(may_train=True)
            kept.save()
            update = hand_out.exchange(Report("one", "a"), [], store_failures=kept.failures)
            assert update.version[1] == made.figures()["adopted"]
            assert bool(update.tensors) == (update.version[1] > 0), "drafters have it"
            assert update.figures["store_failures"] == kept.failures == made.figures()["adopted"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert not list(versions.iterdir()), "nothing half written stays"
    serve(made)
    kept.save()
    assert kept.failures == 2
    assert store.latest(set(made.serving.tensors))[0] == made.serving.version.number == 3


def text(*ids, prompt=0):
    tops = torch.zeros(len(ids) - 1, 4)
    return Text(prompt, 0, torch.tensor(ids), 1, tops.long(), tops)


def test_general_texts_that_are_not_there_are_an_error_with_the_field(tmp_path):
    """Else they would protect nothing, and nobody would know."""
    assert general_texts(None, 384, 100) == []
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"drafter\.learn\.general: .* it has no batch-"):
            general_texts(str(directory), 384, 100)


def test_of_general_texts_those_count_that_the_drafter_can_read(tmp_path):
    jobs = Job(0, 0, tuple(range(LEAST_GENERAL + 2)))
    fit = [text(1, 2, 3, prompt=prompt) for prompt in range(LEAST_GENERAL)]
    TextStore(tmp_path).save(jobs, [*fit, text(1, 100, 3), text(*range(50))])
    assert [each.ids.tolist() for each in general_texts(str(tmp_path), 49, 100)] == [[1, 2, 3]] * LEAST_GENERAL
    with pytest.raises(FileNotFoundError, match="its 1 files hold texts to 0 prompts that fit, 24 are needed"):
        general_texts(str(tmp_path), 49, 3)


def test_general_texts_that_are_too_few_to_tell_a_loss_by_are_an_error(tmp_path):
    """Of two answers to one prompt one counts: with so few nothing would ever be certain, and nothing learned."""
    TextStore(tmp_path).save(Job(0, 0, (0, 1)), [text(1, 2, 3, prompt=n // 2) for n in range(2 * LEAST_GENERAL - 2)])
    with pytest.raises(FileNotFoundError, match=r"drafter\.learn\.general: .* texts to 23 prompts"):
        general_texts(str(tmp_path), 49, 100)


def test_a_trainer_outlives_a_sole_drafter_s_restart_where_its_memory_is_all_there_is():
    assert life_s(LearningConfig()) == 1800
    assert life_s(LearningConfig(directory="/versions")) == IDLE_LIFE_S
    assert IdleLife(life_s(LearningConfig()))._idle_life_s == 1800


class Drafters:
    """Of one trainer, as far as it hears of them."""

    def __init__(self):
        self.learner = learner()
        serve(self.learner)
        self._hand_out = HandOut(self.learner, "base", lambda tensors: tensors)

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
    serve(drafters.learner)
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
    serve(drafters.learner)
    assert drafters.offered("b") == 2


def test_all_drafters_have_to_be_idle_for_a_moment():
    clock = Clock(100.0)
    idle = IdleTime(clock)
    assert idle.is_now, "there is none"
    idle.heard("a", MOMENT_S)
    idle.heard("b", MOMENT_S - 0.01)
    assert not idle.is_now
    idle.heard("b", 30.0)
    assert idle.is_now
    idle.heard("a", None)
    assert not idle.is_now


def test_a_drafter_that_is_gone_holds_nobody_up():
    clock = Clock(100.0)
    idle = IdleTime(clock)
    idle.heard("a", None)
    clock.now += FORGOTTEN_S - 0.1
    idle.heard("b", 2.0)
    assert not idle.is_now
    clock.now += 0.2
    assert idle.is_now
    idle.heard("a", None)
    assert not idle.is_now
