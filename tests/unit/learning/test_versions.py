"""Checks versions of a learning drafter: their status, their files, and which of them drafters are given."""

import shutil

import numpy as np
import pytest
import torch
from google.protobuf import json_format
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.actors.learning.gate import Difference, Verdict
from outrider.actors.learning.service import Report, VersionServer
from outrider.actors.learning.texts import LEAST_GENERAL, MAX_TEXT_TOKENS, Text, general_texts
from outrider.actors.learning.versions import Version, VersionStore, sampled_digest, status_of
from outrider.deploy.distill.texts import Job, TextStore
from outrider.v1 import generation_pb2 as pb
from tests.support.models.tiny_models import build_tiny_llama
from tests.unit.learning.tiny_learner import learner, serve

NAME = "model.layers.0.mlp.up_proj.weight"


def test_the_public_status_has_all_of_it():
    gain = Verdict("gain", Difference(0.05, 0.02, 40), Difference(-0.001, 0.03, 40))
    versions = [
        Version(0, {}, state="replaced"),
        Version(1, {}, 30, 12, gain, None, Difference(-0.1, 0.04, 20), "withdrawn", 1001.0),
        Version(2, {NAME: None}, 60, again=0),
        Version(3, {}, state="reverted"),
    ]
    few = Verdict("no_texts", Difference.of([1.0], [1.0]))
    trainer = {"version": 2, "steps": 70, "tokens": 900, "refused": {"no_gain": 3}, "last_verdict": few.row()}
    status = status_of({"version": 1, "trainer": {**trainer, "versions": [version.row() for version in versions]}})
    told = json_format.ParseDict(status, pb.DrafterLearning(), ignore_unknown_fields=False)
    assert (told.drafting, told.serving, told.steps, told.tokens) == (1, 2, 70, 900)
    assert dict(told.refused) == {"no_gain": 3}
    assert told.last_comparison.reason == "no_texts"
    assert not told.last_comparison.recent.HasField("margin")
    assert [(each.number, each.kept) for each in told.versions] == [(0, False), (1, False), (2, True), (3, False)]
    withdrawn, again = told.versions[1:3]
    assert withdrawn.state == pb.DRAFTER_VERSION_STATE_WITHDRAWN
    assert (withdrawn.verdict.recent.mean, withdrawn.verdict.recent.margin) == (0.05, 0.02)
    assert not withdrawn.verdict.HasField("general")
    assert (withdrawn.since.mean, withdrawn.since.texts) == (-0.1, 20)
    assert (withdrawn.step, withdrawn.began_at.seconds) == (30, 1001)
    assert (again.state, again.again, again.HasField("again")) == (pb.DRAFTER_VERSION_STATE_SERVES, 0, True)
    assert not again.HasField("verdict")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("base") / "drafter")


@pytest.fixture
def store(base, tmp_path):
    return VersionStore(tmp_path / "versions", base)


def changed(base, by):
    return {NAME: load_file(base / "model.safetensors")[NAME] + by}


def test_what_is_kept_is_found_again_and_makes_a_checkpoint(store, base, tmp_path):
    assert store.latest({NAME}) is None
    path = store.save(1, changed(base, 1.0))
    number, tensors = store.latest({NAME})
    assert number == 1
    assert torch.equal(tensors[NAME], changed(base, 1.0)[NAME])
    checkpoint = shutil.copytree(base, tmp_path / "checkpoint")
    shutil.copyfile(path, checkpoint / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.testing.assert_close(dict(model.named_parameters())[NAME].data, changed(base, 1.0)[NAME])


def test_what_is_half_written_or_damaged_is_left_alone(store, base):
    store.save(1, changed(base, 1.0))
    path = store.save(2, changed(base, 2.0))
    path.write_bytes(path.read_bytes()[:-1000])
    path.with_name("version-000003.safetensors.unfinished").write_bytes(b"half")
    path.with_name("version-000004.safetensors").write_bytes(b"")
    assert store.latest({NAME})[0] == 1


def test_after_a_way_back_a_restart_does_not_resume_what_was_left(store, base, tmp_path):
    for number in (1, 2, 3):
        store.save(number, changed(base, number))
    store.remove_after(1)
    assert VersionStore(tmp_path / "versions", base).latest({NAME})[0] == 1
    store.remove_after(0)
    assert store.latest({NAME}) is None, "the drafter as it was loaded"


def test_another_drafter_s_versions_are_its_own(store, base, tmp_path, tmp_path_factory):
    other = build_tiny_llama(tmp_path_factory.mktemp("foreign") / "drafter", noise_of=base, noise=0.01)
    theirs = VersionStore(tmp_path / "versions", other)
    theirs.save(9, changed(base, 1.0))
    assert store.latest({NAME}) is None
    for number in range(1, 6):
        store.save(number, changed(base, number))
    store.remove_after(0)
    assert theirs.latest({NAME})[0] == 9


def test_checkpoints_are_told_apart_in_a_moment_wherever_they_lie(base, tmp_path):
    same = shutil.copytree(base, tmp_path / "copy")
    assert sampled_digest(same) == sampled_digest(base)
    data = bytearray((same / "model.safetensors").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    (same / "model.safetensors").write_bytes(data)
    assert sampled_digest(same) != sampled_digest(base)


def test_a_version_that_a_drafter_could_not_load_is_not_given_to_it_again():
    made = learner()
    put = []
    server = VersionServer(made, "base", lambda tensors: put.append(tensors) or tensors)

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
    assert len(put) == 2, "each version once"


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
    """One of two answers to a prompt counts: with so few nothing would ever be certain, and nothing learned."""
    texts = [text(1, 2, 3, prompt=number // 2) for number in range(2 * LEAST_GENERAL - 2)]
    for _ in range(files):
        TextStore(tmp_path).save(Job(0, 0, (0, 1)), texts)
    with pytest.raises(FileNotFoundError, match=rf"drafter\.learn\.general: .* texts to {23 * files} prompts"):
        general_texts(str(tmp_path), 100)
