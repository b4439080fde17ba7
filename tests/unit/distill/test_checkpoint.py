"""Directories and files that are there whole or not at all."""

import json

import pytest
import torch

from outrider.cluster.whole_files import whole_directory, whole_file
from outrider.deploy.distill.checkpoint import Checkpoints


def fill_half(file):
    file.write_text("half")
    file.with_name("never written").read_text()


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_text("old")
    with pytest.raises(FileNotFoundError), whole_directory(tmp_path / "d") as work:
        fill_half(work / "new")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"], "on a full disk it would be in the way"
    with whole_directory(tmp_path / "d") as work:
        assert list(work.iterdir()) == []
        (work / "new").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["new"]


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    file = tmp_path / "f"
    with whole_file(file) as work:
        work.write_text("one")
    with pytest.raises(FileNotFoundError), whole_file(file) as work:
        fill_half(work)
    assert file.read_text() == "one"
    assert list(tmp_path.iterdir()) == [file]


def save(checkpoints, step):
    tensors = {"w": torch.full((3,), float(step))}
    checkpoints.save(
        step, {"hidden_size": 3}, tensors, {"state": {0: {"step": torch.tensor(step)}}}, {"elapsed_s": 1.5}
    )


def test_the_last_complete_checkpoint_is_loaded_and_older_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    for step in (9, 10, 200):
        save(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000200"]
    tensors, optimizer, about = checkpoints.load(checkpoints.latest())
    assert tensors["w"].tolist() == [200.0] * 3
    assert int(optimizer["state"][0]["step"]) == about["step"] == 200
    assert about["elapsed_s"] == 1.5


@pytest.mark.parametrize("harm", ["no manifest", "short file", "missing file", "not renamed"])
def test_a_half_written_checkpoint_is_never_loaded(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = tmp_path / "step-00000002"
    if harm == "no manifest":
        (newest / "outrider.json").unlink()
    elif harm == "short file":
        file = newest / "trained.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "missing file":
        (newest / "optimizer.pt").unlink()
    else:
        newest.rename(tmp_path / "step-00000002.unfinished")
    assert checkpoints.latest() == tmp_path / "step-00000001"
    assert json.loads((checkpoints.latest() / "outrider.json").read_text())["step"] == 1
