"""Prompt files, and what is wrong with them by file and line."""

import gzip
import json

import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy.distill.prompts import MAX_LINE_BYTES, Prompt, read_prompts, spread, tokens_of


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = read_prompts(write(tmp_path / "p.txt", "one\ntwo words\r\nthree"))
    assert [prompt.text for prompt in file.prompts] == ["one", "two words", "three"]
    assert file.prompts[2].where.endswith("p.txt, line 3")


def test_json_lines_have_prompts_or_messages_gzipped_too(tmp_path):
    rows = [{"prompt": "one", "id": 3}, {"messages": [{"role": "user", "content": "two"}]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    plain = read_prompts(write(tmp_path / "p.jsonl", lines))
    assert [(prompt.text, prompt.messages) for prompt in plain.prompts] == [("one", ()), ("", (("user", "two"),))]
    zipped = read_prompts(write(tmp_path / "p.jsonl.gz", gzip.compress(lines.encode())))
    assert zipped.sha256 == plain.sha256
    assert [prompt.digest for prompt in zipped.prompts] == [prompt.digest for prompt in plain.prompts]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "one\n\ntwo\n", r"p\.txt, line 2: empty"),
        ("p.txt", "one\n   \n", r"p\.txt, line 2: empty"),
        ("p.txt", "", r"p\.txt is empty"),
        ("p.txt", b"one\n\xff\xfe\n", r"p\.txt, line 2: not UTF-8"),
        ("p.txt", b"one\ntwo\x00\n", r"p\.txt, line 2: binary"),
        ("p.txt", "x" * (MAX_LINE_BYTES + 1), r"p\.txt, line 1: longer than \d+ bytes"),
        ("p.csv", "one", r"p\.csv is neither \.txt"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', r"p\.jsonl, line 2: not JSON"),
        ("p.jsonl", '{"text": "a"}\n', r"p\.jsonl, line 1: one of the fields"),
        ("p.jsonl", '{"prompt": "a", "messages": []}\n', r"line 1: one of the fields"),
        ("p.jsonl", '{"prompt": " "}\n', r"line 1: prompt is no text, or empty"),
        ("p.jsonl", '{"messages": []}\n', r"line 1: messages is no list"),
        ("p.jsonl", '{"messages": [{"role": "robot", "content": "a"}]}\n', r"line 1: messages is no list"),
        ("p.jsonl", '["a"]\n', r"line 1: one of the fields"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud800"}\n', r"p\.jsonl, line 2: half a character"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "a\\udc00"}]}\n', r"line 1: half a character"),
        ("p.jsonl", '{"prompt": "a\\u0000b"}\n', r"p\.jsonl, line 1: binary"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "a\\u0000"}]}\n', r"p\.jsonl, line 1: binary"),
        ("p.jsonl", '{"prompt": "a"}\n' + "[" * 200_000 + "\n", r"p\.jsonl, line 2: not JSON"),
        ("p.jsonl.gz", "not gzip", r"p\.jsonl\.gz is not readable"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(write(tmp_path / name, content))
    assert str(error.value).startswith("--data: ")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_prompts(tmp_path / "none.txt", "--dataset")


def test_spread_is_even_over_the_file():
    prompts = [Prompt(str(index), (), "x") for index in range(10)]
    assert [prompt.where for prompt in spread(prompts, 3)] == ["0", "3", "6"]
    assert spread(prompts, None) == spread(prompts, 99) == prompts


class Words:
    """A tokenizer of words, with a chat template that adds two tokens."""

    def __init__(self, chat_template="there is one"):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "<chat> " + " ".join(message["content"] for message in messages) + " <answer>"


def test_chats_go_through_the_template_and_texts_do_not():
    prompts = [Prompt("f, line 1", (), "a bb"), Prompt("f, line 2", (("user", "a bb"),))]
    assert tokens_of(prompts, Words(), 9, False, "", "--data") == [[1, 2], [6, 1, 2, 8]]
    assert tokens_of(prompts, Words(), 9, True, "", "--data") == [[6, 1, 2, 8]] * 2


def test_a_prompt_too_long_names_its_line_and_what_to_do():
    prompts = [Prompt("f, line 1", (), "a"), Prompt("f, line 2", (), "a a a a"), Prompt("f, line 3", (), "a a a a a")]
    with pytest.raises(ConfigError, match=r"f, line 2: 4 tokens, a prompt has room for 3; raise it \(2 prompts"):
        tokens_of(prompts, Words(), 3, False, "raise it", "--data")


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(ConfigError, match=r"f, line 7: a chat, and the target's tokenizer has no chat template"):
        tokens_of([Prompt("f, line 7", (("user", "a"),))], Words(None), 9, False, "", "--data")
    with pytest.raises(ConfigError, match="without --chat"):
        tokens_of([Prompt("f, line 7", (), "a")], Words(None), 9, True, "", "--data")


def test_json_may_hold_lines_and_tabs(tmp_path):
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "one\\n\\ttwo\\r\\n"}\n')).prompts
    assert prompt.text == "one\n\ttwo\r\n"


def test_a_chat_template_that_refuses_is_an_error_with_file_and_line():
    class Refusing:
        chat_template = "{{ raise_exception('roles must alternate') }}"

        def apply_chat_template(self, messages, **options):
            if len(messages) > 1:
                raise RuntimeError("roles must alternate\nsomewhere in jinja")
            return "text"

        def __call__(self, text, **options):
            return {"input_ids": [1, 2]}

    one = Prompt("p.jsonl, line 1", (("user", "a"),))
    two = Prompt("p.jsonl, line 2", (("user", "a"), ("user", "b")))
    message = r"--data: p\.jsonl, line 2: the chat template refuses it \(roles must alternate\)"
    with pytest.raises(ConfigError, match=message):
        tokens_of([one, two], Refusing(), 100, False, "", "--data")
