"""A drafter trained on a tiny target: acceptance rises, the same by seed, resumed or not; vLLM loads it.

The target's first layer passes on what it gets, and its second makes the next token from the last one, mostly. So a
drafter of the first layer starts from nothing, and can learn what the second does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.actors.learning.draft_models import load
from outrider.actors.learning.texts import read_texts
from outrider.cluster.config import ConfigError
from outrider.deploy.cli import main
from outrider.deploy.distill import run as distill_run
from outrider.deploy.distill.run import Settings, distill
from outrider.deploy.models.store import read_manifest
from outrider.deploy.progress import Progress
from tests.support.models.tiny_models import EOS, build_learnable

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parents[2]
STEPS = 50


class Interrupted(Exception):
    pass


@pytest.fixture
def other_allocator(monkeypatch):
    """The commands change how their process allocates, for good; this one runs other tests too."""
    monkeypatch.setattr("outrider.deploy.distill.models.keep_large_blocks", lambda: True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_learnable(tmp_path_factory.mktemp("target") / "learnable")


@pytest.fixture(scope="module")
def settings(target, tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    colours, animals = "red green blue black white grey pink gold", "cat dog cow hen fox owl bee ant elk emu"
    data.write_text(
        "".join(json.dumps({"prompt": f"{a} and {b}"}) + "\n" for a in colours.split() for b in animals.split())
    )
    return Settings(
        target=str(target),
        data=(data,),
        out=tmp_path_factory.mktemp("out") / "first",
        kind="draft_model",
        k=3,
        layers=1,
        start=None,
        steps=STEPS,
        seq_len=56,
        answer_tokens=40,
        samples=2,
        chat=False,
        draft_vocab_size=None,
        learning_rate=5e-3,
        batch_size=16,
        seed=0,
        device="cpu",
        dtype="float32",
        bits=16,
    )


@pytest.fixture(scope="module")
def trained(settings):
    """Its directory."""
    distill(settings, Progress())
    return settings.out


def tensors_of(out):
    return load_file(out / "drafter" / "drafter.safetensors")


def test_acceptance_on_held_out_answers_rises_well_above_the_start(trained):
    rows = [json.loads(line) for line in (trained / "progress.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0
    assert rows[-1]["step"] == STEPS
    assert rows[-1]["acceptance_rate"] > rows[0]["acceptance_rate"] + 0.2
    assert rows[-1]["loss"] < rows[1]["loss"] / 2
    made = json.loads((trained / "drafter" / "drafter.json").read_text())["made"]
    assert (made["steps"], made["seed"], made["layers_of_target"]) == (STEPS, 0, [0])


def test_texts_are_the_targets_own_with_its_likeliest_tokens(trained, target):
    """vLLM's engine makes them, many at once; transformers is asked text by text."""
    model = load(target, torch.float32, "cpu")
    greedy = drawn = 0
    for file in sorted((trained / "texts").iterdir()):
        for text in read_texts(file):
            with torch.inference_mode():
                logits = model(torch.from_numpy(text.ids).long()[None]).logits[0, text.start - 1 : -1]
            log_p = logits.log_softmax(-1)
            top_log_p = torch.from_numpy(text.top_log_p).float()
            found = log_p.gather(1, torch.from_numpy(text.top_ids).long())
            torch.testing.assert_close(top_log_p, found, atol=5e-3, rtol=2e-3)  # kept as float16
            assert (top_log_p[:, 0] >= log_p.max(1).values - 5e-3).all()
            answer = torch.from_numpy(text.ids[text.start :]).long()
            best = (log_p.gather(1, answer[:, None])[:, 0] >= log_p.max(1).values - 1e-3).float().mean()
            greedy, drawn = greedy + int(best == 1), drawn + int(best < 1)
            assert len(answer) == 40 or answer[-1] == EOS
    assert greedy >= 80, "the first answer to each prompt is greedy"
    assert drawn >= 60, "the second is drawn"


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(trained, settings, tmp_path, monkeypatch):
    """The same seed gives the same drafter in another directory, in which everything is made anew."""
    again = dataclasses.replace(settings, out=tmp_path / "again")
    monkeypatch.setattr(distill_run, "SAVE_EVERY_S", -1.0)  # after every step
    whole = distill_run._Run._save

    def interrupted(self, trainer, rows, step):
        whole(self, trainer, rows, step)
        if step == STEPS // 2:
            raise Interrupted

    monkeypatch.setattr(distill_run._Run, "_save", interrupted)
    with pytest.raises(Interrupted):
        distill(again, Progress())
    monkeypatch.undo()
    texts = {file.name: file.stat().st_mtime_ns for file in (again.out / "texts").iterdir()}
    # What an interruption in the middle of writing leaves.
    (again.out / "checkpoints" / f"step-{STEPS:08d}.unfinished").mkdir()
    distill(again, Progress())
    assert {file.name: file.stat().st_mtime_ns for file in (again.out / "texts").iterdir()} == texts
    first, second = tensors_of(trained), tensors_of(again.out)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_another_drafter_and_needs_another_directory(trained, settings):
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(seed 0, now 1\)"):
        distill(dataclasses.replace(settings, seed=1), Progress())


@pytest.mark.exhaustive
def test_a_drafter_is_trained_further_with_a_draft_vocabulary(trained, settings, tmp_path):
    further = dataclasses.replace(
        settings, out=tmp_path / "further", layers=None, start=str(trained / "model"), steps=4, draft_vocab_size=60
    )
    distill(further, Progress())
    document = json.loads((further.out / "drafter" / "drafter.json").read_text())
    assert "model.embed_tokens.weight" in document["borrowed"]  # it has the target's, which are not stored again
    assert len(document["draft_vocabulary"]) == 60
    rows = [json.loads(line) for line in (further.out / "progress.jsonl").read_text().splitlines()]
    last = json.loads((trained / "progress.jsonl").read_text().splitlines()[-1])
    assert rows[0]["acceptance_rate"] == pytest.approx(last["acceptance_rate"])


def test_acceptance_is_measured_by_position_and_k(trained, settings, tmp_path, capsys, other_allocator):
    report_file = tmp_path / "report.json"
    command = ["acceptance", str(settings.target), str(trained / "model"), "--dataset", str(settings.data[0])]
    command += ["--limit", "12", "--k", "3", "--max-tokens", "40", "--dtype", "float32", "--json", str(report_file)]
    assert main(command) == 0
    report = json.loads(report_file.read_text())
    assert len(report["by_position"]) == len(report["by_k"]) == 3
    assert report["acceptance_rate"] > 0.2
    assert 0.1 < report["overlap"] < 1.0
    assert "tokens a round" in capsys.readouterr().out


def test_the_assembled_drafter_loads_in_vllm_by_our_own_draft_engine(trained, target):
    assert read_manifest(trained / "model")["drafter_of"]["name"] == target.name
    command = [sys.executable, "tests/support/models/draft_engine_texts.py", str(trained / "model"), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["drafts"] == seen["wanted"]
