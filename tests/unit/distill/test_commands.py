"""`outrider distill` and `outrider acceptance` before a model is loaded: what is wrong is said in one line."""

import json

import pytest

from outrider.deploy import cli
from tests.support.models.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(8)))
    return file


@pytest.fixture(autouse=True)
def other_allocator(monkeypatch):
    """The commands change how their process allocates, for good; this one runs other tests too."""
    monkeypatch.setattr("outrider.deploy.distill.models.keep_large_blocks", lambda: True)


def failure(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("outrider: [")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data: no prompts"),
        (["--data", "{data}", "--layers", "2"], "--layers: 2 is not in 1 to 1; the target has 2 layers"),
        (["--data", "{data}", "--seq-len", "20", "--answer-tokens", "15"], "prompts.jsonl, line 1: 8 tokens"),
        (["--data", "nowhere.jsonl"], "--data: nowhere.jsonl: no such file"),
        (["--data", "{data}", "--chat", "--layers", "1"], "no chat template takes it"),
        (["--data", "{data}", "--from", "{data}"], "--from: "),
        (["--data", "{data}", "--kind", "mlp", "--layers", "1"], "--kind mlp: takes no --layers, --from"),
        (["--assemble", "{data}"], "is no stored drafter"),
    ],
)
def test_what_distill_refuses(target, data, tmp_path, capsys, options, message):
    given = [option.format(data=data) for option in options]
    if not {"--layers", "--from", "--assemble"} & set(given):
        given += ["--layers", "1"]
    assert message in failure(capsys, "distill", target, "--out", tmp_path / "out", *given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{target}", "{target}", "--json", "/proc/out.json"], "--json: /proc/out.json cannot be written"),
        (["{target}", "/nowhere/at/all"], "DRAFTER: /nowhere/at/all does not exist"),
    ],
)
def test_what_acceptance_refuses(target, data, capsys, options, message):
    given = [option.format(target=target) for option in options]
    assert message in failure(capsys, "acceptance", *given, "--dataset", data)
