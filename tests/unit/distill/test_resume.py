"""What a run of distill that goes on takes from the one before, and whose it may be."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.cluster.config import ConfigError
from outrider.deploy.distill.run import Settings, _Run
from outrider.deploy.progress import Progress
from tests.support.models.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt": "prompt {number}"}}\n' for number in range(8)))
    return file


def a_run(target, prompts, out, **changes):
    out.mkdir(exist_ok=True)
    settings = {
        "target": str(target), "data": (prompts,), "out": out, "kind": "draft_model", "k": 3, "layers": 1,
        "start": None, "steps": 10,
        "seq_len": 64, "answer_tokens": 16, "samples": 1, "chat": False, "draft_vocab_size": None,
        "learning_rate": 1e-3, "batch_size": 4, "seed": 0, "device": "cpu", "dtype": "float32",
        "bits": 16,
    }  # fmt: skip
    return _Run(Settings(**(settings | changes)), Progress())


def save(run, step):
    optimizer = SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(trained={"w": torch.full((3,), float(step))}, optimizer=optimizer)
    run._save(trainer, [{"step": 0}], step)


def test_the_last_complete_checkpoint_counts_and_older_ones_go(target, prompts, tmp_path):
    run = a_run(target, prompts, tmp_path / "out")
    assert run._complete() == []
    for step in (9, 10, 200):
        save(run, step)
    assert [path.name for path in run._complete()] == ["step-00000010", "step-00000200"]


@pytest.mark.parametrize("harm", ["no manifest", "short file", "missing file", "not renamed"])
def test_a_half_written_checkpoint_is_never_loaded(target, prompts, tmp_path, harm):
    run = a_run(target, prompts, tmp_path / "out")
    save(run, 1)
    save(run, 2)
    newest = run._complete()[-1]
    if harm == "no manifest":
        (newest / "outrider.json").unlink()
    elif harm == "short file":
        file = newest / "trained.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "missing file":
        (newest / "optimizer.pt").unlink()
    else:
        newest.rename(newest.with_name("step-00000002.unfinished"))
    assert [path.name for path in run._complete()] == ["step-00000001"]


def test_a_run_is_known_by_what_its_files_hold_not_by_their_names(target, prompts, tmp_path):
    a_run(target, prompts, tmp_path / "out")
    renamed = Path(shutil.copytree(target, tmp_path / "another name"))
    moved = Path(shutil.copy(prompts, tmp_path / "moved.jsonl"))
    a_run(renamed, moved, tmp_path / "out")
    moved.write_text(moved.read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(ConfigError, match=r"other settings \(data \['\w{64}'\], now \['\w{64}'\]\)"):
        a_run(renamed, moved, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"other settings \(target \w{64}, now \w{64}\)"):
        a_run(build_tiny_llama(tmp_path / "other", noise_of=target, noise=0.1), prompts, tmp_path / "out")
