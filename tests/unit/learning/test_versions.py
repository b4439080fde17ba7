"""Versions: what the public status says of them, and the file of each on disk."""

import shutil

import pytest
import torch
from google.protobuf import json_format
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.actors.learning.gate import Difference, Verdict
from outrider.actors.learning.versions import KEPT_VERSIONS, Version, VersionStore, sampled_digest, status_of
from outrider.v1 import generation_pb2 as pb
from tests.support.models.tiny_models import build_tiny_llama

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


def test_the_latest_ones_are_kept(store, base):
    for number in (1, 2, 3, 10):
        path = store.save(number, changed(base, number))
    names = [f"version-{number:06d}.safetensors" for number in (2, 3, 10)]
    assert sorted(each.name for each in path.parent.iterdir()) == names
    assert len(names) == KEPT_VERSIONS
    assert store.latest({NAME})[0] == 10


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
