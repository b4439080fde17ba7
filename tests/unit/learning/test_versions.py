"""Versions on disk: whole, of this drafter, and no more than are wanted."""

import json
import os
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.actors.learning.versions import LEFT, NOTE, TENSORS, VersionStore, sampled_digest
from tests.tiny_models import build_tiny_llama

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("base") / "drafter")


@pytest.fixture
def store(base, tmp_path):
    return VersionStore(tmp_path / "versions", base, kept=2)


def changed(base, by):
    return {NAME: load_file(base / TENSORS)[NAME] + by}


def test_what_is_kept_is_a_checkpoint_and_is_found_again(store, base):
    assert store.latest({NAME}) is None
    path = store.save(1, changed(base, 1.0), {"steps": 5})
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(dict(model.named_parameters())[NAME].data, changed(base, 1.0)[NAME])
    assert (path / "tokenizer.json").exists()
    assert json.loads((path / NOTE).read_text())["figures"] == {"steps": 5}
    number, tensors = store.latest({NAME})
    assert number == 1
    assert torch.equal(tensors[NAME], changed(base, 1.0)[NAME])


def test_the_latest_ones_are_kept(store, base, tmp_path):
    for number in (1, 2, 3, 10):
        store.save(number, changed(base, number), {})
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["version-000003", "version-000010"]
    assert store.latest({NAME})[0] == 10


def test_what_is_half_written_or_damaged_is_left_alone(store, base, tmp_path):
    store.save(1, changed(base, 1.0), {})
    path = store.save(2, changed(base, 2.0), {})
    data = bytearray((path / TENSORS).read_bytes())
    data[-1] ^= 255
    (path / TENSORS).write_bytes(data)
    half = tmp_path / "versions" / "version-000003.unfinished"
    half.mkdir()
    (half / NOTE).write_text("{}")
    (tmp_path / "versions" / "version-000004").mkdir()
    (tmp_path / "versions" / "version-000005").mkdir()
    (tmp_path / "versions" / "version-000005" / NOTE).write_text('{"base_sha256":')
    assert store.latest({NAME})[0] == 1


def test_another_drafter_s_versions_are_left_alone(store, base, tmp_path, tmp_path_factory):
    store.save(1, changed(base, 1.0), {})
    other = build_tiny_llama(tmp_path_factory.mktemp("other") / "another one")
    assert VersionStore(tmp_path / "versions", other, kept=2).latest({NAME}) is None


def test_a_full_disk_leaves_what_was_there(store, base, monkeypatch, tmp_path):
    store.save(1, changed(base, 1.0), {})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(2, changed(base, 2.0), {})
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["version-000001"]
    assert store.latest({NAME})[0] == 1
    store.save(2, changed(base, 2.0), {})
    assert store.latest({NAME})[0] == 2


def test_what_a_trainer_left_unfinished_goes_with_the_next_version(store, base, tmp_path):
    store.save(1, changed(base, 1.0), {})
    old, young = (tmp_path / "versions" / f"version-00000{number}.unfinished" for number in (7, 8))
    for path in (old, young):
        path.mkdir()
        (path / TENSORS).write_text("half")
    os.utime(old, (0, 0))
    store.save(2, changed(base, 2.0), {})
    assert not old.exists()
    assert young.exists(), "another trainer may be at work on it"


def test_a_way_back_outlives_a_restart_before_the_version_is_written(base, tmp_path):
    """As the directory is when the process ends right after the answer."""
    store = VersionStore(tmp_path / "versions", base, kept=8)
    for number in (1, 2, 3):
        store.save(number, changed(base, number), {})
    store.leave(1, 4)
    again = VersionStore(tmp_path / "versions", base, kept=8)
    assert again.latest({NAME})[0] == 1
    assert again.highest() == 4, "its number is taken"
    again.save(4, changed(base, 1), {})
    again.save(5, changed(base, 5), {})
    assert again.latest({NAME})[0] == 5
    again.leave(0, 6)
    assert again.latest({NAME}) is None, "the drafter as it was loaded"
    again.save(6, changed(base, 6), {})
    assert again.latest({NAME})[0] == 6


def test_another_drafter_s_way_back_is_its_own(store, base, tmp_path, tmp_path_factory):
    other = build_tiny_llama(tmp_path_factory.mktemp("foreign") / "another one")
    store.save(1, changed(base, 1.0), {})
    VersionStore(tmp_path / "versions", other, kept=2).leave(0, 9)
    assert store.latest({NAME})[0] == 1
    (tmp_path / "versions" / LEFT).write_text("[{")
    assert store.latest({NAME})[0] == 1


def test_a_disk_that_is_really_full_is_an_error_of_the_disk(store, base):
    store.save(1, changed(base, 1.0), {})
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError):
            store.save(2, changed(base, 2.0), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert store.latest({NAME})[0] == 1


def test_another_drafter_s_versions_neither_go_nor_make_ours_go(store, base, tmp_path, tmp_path_factory):
    other = build_tiny_llama(tmp_path_factory.mktemp("foreign") / "another one")
    theirs = VersionStore(tmp_path / "versions", other, kept=3)
    for number in (48, 49, 50):
        theirs.save(number, changed(base, 1.0), {})
    assert store.highest() == 50
    for number in (51, 52, 53):
        store.save(number, changed(base, number), {})
    assert store.latest({NAME})[0] == 53
    names = sorted(path.name for path in (tmp_path / "versions").iterdir())
    assert names == [f"version-0000{number}" for number in (48, 49, 50, 52, 53)]


def test_checkpoints_are_told_apart_in_a_moment_wherever_they_lie(base, tmp_path):
    same = shutil.copytree(base, tmp_path / "copy")
    assert sampled_digest(same) == sampled_digest(base)
    data = bytearray((same / TENSORS).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    (same / TENSORS).write_bytes(data)
    assert sampled_digest(same) != sampled_digest(base)
