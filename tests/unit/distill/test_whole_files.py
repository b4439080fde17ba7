"""Directories and files that are there whole or not at all."""

import pytest

from outrider.cluster.whole_files import whole_directory, whole_file


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
