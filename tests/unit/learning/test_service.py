"""The trainer's process but for Ray: what it gives to drafters, keeps on disk, and reads of general texts."""

import asyncio

import numpy as np
import pytest

from outrider.actors.drafter.shared_actor import IdleLife
from outrider.actors.learning.service import DrafterTrainer, Report, VersionServer
from outrider.actors.learning.texts import LEAST_GENERAL, MAX_TEXT_TOKENS, Text, general_texts
from outrider.deploy.distill.texts import Job, TextStore
from tests.unit.learning.tiny_learner import learner, serve


class PlayedStore:
    def __init__(self, fails=False):
        self.removed, self.fails = [], fails

    def remove_after(self, number):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.removed.append(number)


@pytest.mark.parametrize("fails", [False, True])
def test_a_way_back_is_on_disk_before_it_is_answered(fails):
    one = object.__new__(DrafterTrainer)  # without what its process loads at the start
    one._learner, one._life, one._store, one._store_failures = learner(), IdleLife(), PlayedStore(fails), 0
    for _ in range(3):
        serve(one._learner)
    assert asyncio.run(one.go_back(1)) == (4, "")
    assert one._store.removed == ([] if fails else [1])
    assert one._store_failures == fails, "a disk that is full costs the copies there and nothing else"
    assert asyncio.run(one.go_back(9))[0] is None
    assert len(one._store.removed) == (not fails)


def test_a_version_that_a_drafter_could_not_load_is_not_given_to_it_again():
    made = learner()
    server = VersionServer(made, "base", lambda tensors: tensors)

    def offered(held=None, refused=None, drafter="one"):
        update = server.exchange(Report(drafter, held, refused), [])
        return update.version[1] if update.tensors else None

    assert offered() is None, "it drafts as it was loaded"
    serve(made)
    version = (made.id, 1)
    assert [offered(), offered()] == [1, 1], "it may still be loading"
    assert offered(held=version) is None
    assert offered(held=version, refused=version) is None
    assert offered() is None, "after a restart"
    assert offered(drafter="another") == 1
    serve(made)
    assert offered() == 2


def text(*ids, prompt=0):
    tops = np.zeros((len(ids) - 1, 4))
    return Text(prompt, 0, np.array(ids, np.int32), 1, tops.astype(np.int32), tops.astype(np.float16))


def test_of_general_texts_those_count_that_the_drafter_can_read(tmp_path):
    fit = [text(1, 2, 3, prompt=prompt) for prompt in range(LEAST_GENERAL)]
    others = [text(1, 100, 3), text(*[1] * (MAX_TEXT_TOKENS + 1))]
    TextStore(tmp_path).save(Job(0, 0, tuple(range(LEAST_GENERAL + 2))), [*fit, *others])
    assert [each.ids.tolist() for each in general_texts(str(tmp_path), 100)] == [[1, 2, 3]] * LEAST_GENERAL
    assert general_texts(None, 100) == []


@pytest.mark.parametrize("files", [0, 1])
def test_general_texts_that_are_too_few_to_tell_a_loss_by_are_an_error(tmp_path, files):
    """Of two answers to one prompt one counts: with so few nothing would ever be certain, and nothing learned."""
    texts = [text(1, 2, 3, prompt=number // 2) for number in range(2 * LEAST_GENERAL - 2)]
    for _ in range(files):
        TextStore(tmp_path).save(Job(0, 0, (0, 1)), texts)
    with pytest.raises(FileNotFoundError, match=rf"drafter\.learn\.general: .* texts to {23 * files} prompts"):
        general_texts(str(tmp_path), 100)
