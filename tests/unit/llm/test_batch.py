"""The files of a batch: which requests are refused, and what an interrupted run still has to answer."""

from __future__ import annotations

import json

import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy.llm.batch import answered, read_requests

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_requests_are_read_in_order(tmp_path):
    path = write(tmp_path / "in", GOOD, "", {**GOOD, "custom_id": "b", "url": "/v1/chat/completions"})
    assert [request.custom_id for request in read_requests(path)] == ["a", "b"]


WRONG = {
    "no JSON": ("{", "line 1: is not JSON"),
    "no id": ({**GOOD, "custom_id": ""}, "line 1: custom_id: "),
    "another address": ({**GOOD, "url": "/v1/embeddings"}, "line 1: url: must be one of"),
    "another method": ({**GOOD, "method": "GET"}, "line 1: method: "),
    "no body": ({**GOOD, "body": "x"}, "line 1: body: "),
    "a stream": ({**GOOD, "body": {"stream": True}}, "line 1: body.stream: "),
}


@pytest.mark.parametrize(("line", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_told_by_number_and_field(tmp_path, line, error):
    with pytest.raises(ConfigError, match=error):
        read_requests(write(tmp_path / "in", line))


def test_an_id_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="line 2: custom_id: 'a' stands in the file twice"):
        read_requests(write(tmp_path / "in", GOOD, GOOD))


def test_a_line_that_was_not_written_whole_is_cut_off_and_answered_again(tmp_path):
    path = write(tmp_path / "out", {"custom_id": "a"}, {"custom_id": "b"})
    path.write_text(path.read_text() + '{"custom_id": "c", "resp')
    assert answered(path) == {"a", "b"}
    assert answered(write(tmp_path / "out", *path.read_text().splitlines())) == {"a", "b"}
    assert answered(tmp_path / "missing") == set()


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = write(tmp_path / "notes", "my", "notes")
    with pytest.raises(ConfigError, match="holds lines that are no answers"):
        answered(path)
    assert path.read_text() == "my\nnotes\n"
