"""`outrider prompts`: a model speaks in a user's place, and what it says can be distilled with."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from outrider.deploy.cli import main
from outrider.deploy.distill.prompts import read_prompts
from tests.tiny_models import EOS, build_learnable

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(600)]


def set_template(checkpoint, template):
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A model whose texts hardly ever end."""
    checkpoint = build_learnable(tmp_path_factory.mktemp("silent") / "learnable")
    set_template(checkpoint, "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}")
    return checkpoint


@pytest.fixture(scope="module")
def chatty(silent, tmp_path_factory):
    """One that ends a text about where it could say one of some letters."""
    checkpoint = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(silent, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"][EOS] = tensors["lm_head.weight"][ord("a") : ord("h")].sum(0)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def prompts(checkpoint, out, *options):
    return main(["prompts", str(checkpoint), "--out", str(out), "--prompt-tokens", "60", *options])


def test_as_many_as_were_asked_for_no_two_alike_and_the_same_by_seed(chatty, tmp_path, capsys):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert prompts(chatty, tmp_path / f"{name}.jsonl", "--count", "150", "--seed", seed) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "a.jsonl")
    read = read_prompts(tmp_path / "a.jsonl").prompts
    assert len({prompt.digest for prompt in read}) == len(read) == 150
    texts = [text for prompt in read for role, text in prompt.messages]
    assert all(0 < len(text) < 60 and text.replace("\n", "").replace("\t", "").isprintable() for text in texts)
    a, b, c = ((tmp_path / f"{name}.jsonl").read_text() for name in "abc")
    assert a == b != c


def test_a_model_that_does_not_end_its_texts_is_told(silent, tmp_path, capsys):
    assert prompts(silent, tmp_path / "none.jsonl", "--count", "200") == 1
    assert "of 2048 texts" in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


def test_what_cannot_be_is_refused_before_an_engine_starts(chatty, tmp_path, capsys):
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    bare = tmp_path / "bare"
    shutil.copytree(chatty, bare)
    set_template(bare, None)
    plain = tmp_path / "plain"
    shutil.copytree(chatty, plain)
    set_template(plain, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for checkpoint, out, said in (
        (chatty, taken, "exists"),
        (chatty, tmp_path / "prompts.txt", "no .jsonl"),
        (bare, tmp_path / "x.jsonl", "no chat template"),
        (plain, tmp_path / "x.jsonl", "nothing before a user's message"),
    ):
        assert prompts(checkpoint, out) == 1
        assert said in capsys.readouterr().err
    assert taken.read_text() == "mine"
