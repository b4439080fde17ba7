"""`outrider distill` and `outrider acceptance` before a model is loaded: what is wrong is said in one line."""

import json

import pytest

from outrider.deploy import cli
from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(8)))
    return file


@pytest.fixture(autouse=True)
def other_allocator(monkeypatch):
    """The commands change how their process allocates, for good; this one runs other tests too."""
    monkeypatch.setattr("outrider.deploy.distill.memory.keep_large_blocks", lambda: True)


def failure(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("outrider: [")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data: no prompts"),
        (
            ["--data", "{data}", "--answer-tokens", "64", "--seq-len", "64"],
            "--answer-tokens: 64 leave a prompt no room",
        ),
        (["--data", "{data}", "--minutes", "0"], "--minutes: 0 is not a finite number above 0"),
        (["--data", "{data}", "--minutes", "nan"], "--minutes: nan is not a finite number above 0"),
        (["--data", "{data}", "--minutes", "inf"], "--minutes: inf is not a finite number above 0"),
        (["--data", "{data}", "--learning-rate", "0"], "--learning-rate: 0 is not a finite number above 0"),
        (["--data", "{data}", "--learning-rate=-1"], "--learning-rate: -1 is not a finite number above 0"),
        (["--data", "{data}", "--learning-rate", "nan"], "--learning-rate: nan is not a finite number above 0"),
        (["--data", "{data}", "--learning-rate", "inf"], "--learning-rate: inf is not a finite number above 0"),
        (["--data", "{data}", "--layers", "2"], "--layers: 2 is not in 1 to 1; the target has 2 layers"),
        (["--data", "{data}", "--seq-len", "9999"], "--seq-len: 9999, the target was made for 2048 positions"),
        (["--data", "{data}", "--seq-len", "20", "--answer-tokens", "15"], "prompts.txt, line 1: 8 tokens"),
        (["--data", "nowhere.txt"], "--data: nowhere.txt: no such file"),
        (["--data", "{data}", "--chat", "--layers", "1"], "no chat template"),
        (["--data", "{data}", "--from", "{data}"], "--from: "),
        (["--assemble", "{data}"], "is no stored drafter"),
    ],
)
def test_what_distill_refuses(target, data, tmp_path, capsys, options, message):
    given = [option.format(data=data) for option in options]
    if not {"--layers", "--from", "--assemble"} & set(given):
        given += ["--layers", "1"]
    assert message in failure(capsys, "distill", target, "--out", tmp_path / "out", *given)


def test_a_place_to_write_is_looked_for_before_the_work(target, data, capsys):
    said = failure(capsys, "distill", target, "--layers", "1", "--data", data, "--out", "/proc/out")
    assert "distill: --out: /proc/out cannot be made" in said
    assert "prompts: --out: /proc/out.jsonl cannot be written" in failure(
        capsys, "prompts", target, "--out", "/proc/out.jsonl"
    )


def test_too_few_prompts_are_refused(target, tmp_path, capsys):
    file = tmp_path / "few.txt"
    file.write_text("one\ntwo\none\ntwo\n")
    said = failure(capsys, "distill", target, "--layers", "1", "--out", tmp_path / "out", "--data", file)
    assert "fewer than four different prompts" in said


def test_two_runs_in_one_directory_are_refused(target, data, tmp_path, capsys):
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = failure(capsys, "distill", target, "--layers", "1", "--out", out, "--data", data)
    assert "--out: another run is at work" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give TARGET and DRAFTER, or --preset"),
        (["{target}", "{target}", "--preset", "smollm2"], "--preset: it has a target and a drafter"),
        (["{target}", "{target}", "--temperature", "-1"], "--temperature: -1 is below 0"),
        (["{target}", "{target}", "--target-ms", "30"], "give both, or neither"),
        (["{target}", "{target}", "--json", "/nowhere/out.json"], "--json: /nowhere is no directory"),
        (["{target}", "{target}", "--json", "/proc/out.json"], "--json: /proc/out.json cannot be written"),
        (["{target}", "{target}", "--plot", "out.jpg"], "--plot: out.jpg is not called *.png"),
        (["{target}", "/nowhere/at/all"], "DRAFTER: /nowhere/at/all is no directory"),
        (["--preset", "{none}"], "--preset: its drafter is of method none"),
    ],
)
def test_what_acceptance_refuses(target, data, tmp_path, capsys, options, message):
    none = tmp_path / "none.yaml"
    none.write_text(json.dumps({"target": {"model": str(target)}}))
    given = [option.format(target=target, none=none) for option in options]
    assert message in failure(capsys, "acceptance", *given, "--dataset", data)


def test_a_drafter_with_other_token_ids_is_refused(target, data, tmp_path, capsys):
    import shutil

    other = tmp_path / "renamed"
    shutil.copytree(target, other)
    document = json.loads((other / "tokenizer.json").read_text())
    document["model"]["vocab"]["!!"] = document["model"]["vocab"].pop("!")
    (other / "tokenizer.json").write_text(json.dumps(document))
    said = failure(capsys, "acceptance", target, other, "--dataset", data)
    assert "its tokenizer differs from the target's" in said
    said = failure(capsys, "distill", target, "--from", other, "--data", data, "--out", tmp_path / "out")
    assert "its tokenizer differs from the target's" in said
