"""`outrider bench`: prompts out of JSONL, which of them, and what a wrong file is told."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy.bench.load import Dataset, read_dataset


def test_plain_and_gzipped_files_hold_the_same_prompts(tmp_path: Path) -> None:
    text = b'{"prompt": "a\\u2028b", "id": 1}\n\n{"prompt": "c"}\n'
    (tmp_path / "p.jsonl").write_bytes(text)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text))
    plain, packed = read_dataset(tmp_path / "p.jsonl"), read_dataset(tmp_path / "p.jsonl.gz")
    assert plain.prompts == packed.prompts == ("a\u2028b", "c")
    assert plain.sha256 == hashlib.sha256(text).hexdigest()


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert read_dataset(tmp_path / "p.jsonl").prompts == ("a\u2028b",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"text": "b"}', r"line 3: no field prompt \(the fields are text\)"),
        ('{"prompt": 5}', "line 1: no field prompt"),
        ('{"prompt": ""}', "line 1: no field prompt"),
        ("[1]", "line 1: no field prompt"),
        ('{"prompt": "a"}\n{', "line 2: not JSON"),
        ("\n\n", "is empty"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_dataset(path)


def test_a_missing_and_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dataset: .*no such file"):
        read_dataset(tmp_path / "none.jsonl")
    (tmp_path / "p.jsonl.gz").write_text("not gzip")
    with pytest.raises(ConfigError, match="not readable"):
        read_dataset(tmp_path / "p.jsonl.gz")


def test_prompts_are_spread_over_the_whole_file() -> None:
    dataset = Dataset(Path("d"), "", tuple(map(str, range(10))))
    assert dataset.spread(4) == (0, 2, 5, 7)
    assert dataset.spread(10) == dataset.spread(99) == dataset.spread(None) == tuple(range(10))
