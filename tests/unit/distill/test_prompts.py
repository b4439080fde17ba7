"""Prompt files, and what is wrong with them by file and line."""

import gzip
import json

import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy.distill.prompts import Prompt, read_prompts, tokens_of


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_json_lines_have_prompts_or_messages_gzipped_too(tmp_path):
    rows = [{"prompt": "one\n\ttwo", "id": 3}, {"messages": [{"role": "user", "content": "two"}]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    plain = read_prompts(write(tmp_path / "p.jsonl", lines))
    found = [(prompt.text, prompt.messages) for prompt in plain.prompts]
    assert found == [("one\n\ttwo", ()), ("", (("user", "two"),))]
    zipped = read_prompts(write(tmp_path / "p.jsonl.gz", gzip.compress(lines.encode())))
    assert zipped.sha256 == plain.sha256
    assert [prompt.digest for prompt in zipped.prompts] == [prompt.digest for prompt in plain.prompts]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", r"p\.jsonl is empty"),
        ("p.jsonl", b"\xff\xfe\n", r"p\.jsonl is not readable"),
        ("p.txt", "one", r"p\.txt is no \.jsonl"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', r"p\.jsonl, line 2: not JSON"),
        ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl, line 1: neither prompt"),
        ("p.jsonl", '{"prompt": " "}\n', r"line 1: neither prompt"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}\n', r"line 1: neither prompt"),
        ("p.jsonl", '["a"]\n', r"line 1: neither prompt"),
        ("p.jsonl.gz", "not gzip", r"p\.jsonl\.gz is not readable"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(write(tmp_path / name, content))
    assert str(error.value).startswith("--data: ")


class Words:
    """A tokenizer of words, with a chat template that adds two tokens."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "<chat> " + " ".join(message["content"] for message in messages) + " <answer>"


def test_chats_go_through_the_template_and_texts_do_not():
    prompts = [Prompt("f, line 1", (), "a bb"), Prompt("f, line 2", (("user", "a bb"),))]
    assert tokens_of(prompts, Words(), 9, False, "--data") == [[1, 2], [6, 1, 2, 8]]
    assert tokens_of(prompts, Words(), 9, True, "--data") == [[6, 1, 2, 8]] * 2
