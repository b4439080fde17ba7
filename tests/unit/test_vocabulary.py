"""What token ids mean, told by digests of blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.cluster.vocabulary import BLOCK, Marks, check_marks, marks_of

TEXT = {f"token {index}": index for index in range(3 * BLOCK)}


def marks(at: Path, tokens: Mapping[str, int], added: Mapping[str, int] | None = None) -> Marks:
    at.mkdir()
    listed = [{"content": token, "id": index} for token, index in (added or {}).items()]
    (at / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": listed}))
    return marks_of(str(at))


def test_tokens_that_were_added_later_may_differ(tmp_path: Path) -> None:
    target = marks(tmp_path / "target", TEXT, {"<think>": 3 * BLOCK})
    for name, added in (
        ("other", {"<end>": 3 * BLOCK}),
        ("none", {}),
        ("more", {f"<{n}>": 3 * BLOCK + n for n in range(9)}),
    ):
        check_marks(target, marks(tmp_path / name, TEXT, added))


def test_another_tokenizer_is_told(tmp_path: Path) -> None:
    target = marks(tmp_path / "target", TEXT)
    shifted = marks(tmp_path / "shifted", {token: index + 1 for token, index in TEXT.items()})
    with pytest.raises(ValueError, match=r"drafter\.model: its tokenizer is not the target's: 3 of 3 blocks of 64 ids"):
        check_marks(target, shifted)


def test_where_there_is_no_tokenizer_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert marks_of(str(tmp_path)) == marks_of("some/hub-id") == ()
    check_marks((), marks(tmp_path / "drafter", TEXT))
    check_marks(marks(tmp_path / "target", TEXT), ())


def test_a_tokenizer_that_cannot_be_read_keeps_no_model_from_loading(tmp_path: Path) -> None:
    for said in ("torn", "[]", '{"model": {"vocab": {}}, "added_tokens": [7]}'):
        (tmp_path / "tokenizer.json").write_text(said)
        assert marks_of(str(tmp_path)) == ()
