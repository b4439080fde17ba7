"""What a run of distill that goes on takes from the one before, and whose it may be."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from outrider.actors.vllm_seam.offline_answers import TOGETHER, Answer
from outrider.cluster.config import ConfigError
from outrider.deploy.distill import run
from outrider.deploy.distill.run import Settings, _Run
from outrider.deploy.progress import Progress
from tests.tiny_models import build_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(4 * TOGETHER)))
    return file


def a_run(target, prompts, out, **changes):
    out.mkdir(exist_ok=True)
    settings = {
        "target": str(target), "data": (prompts,), "out": out, "layers": 1, "start": None, "minutes": 10.0,
        "steps": None, "seq_len": 64, "answer_tokens": 16, "samples": 1, "chat": False, "draft_vocab_size": None,
        "learning_rate": 1e-3, "batch_size": 4, "seed": 0, "device": "cpu", "dtype": "float32",
        "own_share": 0.25, "bits": 16,
    }  # fmt: skip
    return _Run(Settings(**(settings | changes)), Progress())


class PlayedAnswers:
    """A batch takes 20 seconds, and somebody interrupts the third."""

    now, made = 0.0, 0

    def __init__(self, engine):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def of(self, prompts, num_tokens, seed):
        cls = PlayedAnswers
        if cls.made == 2:
            raise KeyboardInterrupt
        cls.now, cls.made = cls.now + 20.0, cls.made + 1
        top = np.zeros((3, 4), np.int32)
        return [Answer([1, 2, 3], top, top.astype(np.float16)) for _ in prompts]


def test_text_that_was_generated_before_the_first_checkpoint_counts(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(PlayedAnswers, "now", 1000.0)
    monkeypatch.setattr(PlayedAnswers, "made", 0)
    monkeypatch.setattr(run, "OfflineAnswers", PlayedAnswers)
    monkeypatch.setattr(run.time, "monotonic", lambda: PlayedAnswers.now)
    first = a_run(target, prompts, tmp_path / "out")
    clock = first._clock({})
    assert (clock.elapsed_s, clock.text_s) == (0.0, 0.0)
    with pytest.raises(KeyboardInterrupt):
        first._texts(None, clock)
    again = a_run(target, prompts, tmp_path / "out")
    clock = again._clock({})
    assert (clock.elapsed_s, clock.text_s) == (40.0, 40.0)
    assert clock.text_until_s() == 240.0, "of ten minutes text may take four, the 40 seconds among them"
    clock = again._clock({"elapsed_s": 90.0, "text_s": 50.0})
    assert (clock.elapsed_s, clock.text_s) == (90.0, 50.0), "a checkpoint that came later"


def test_a_run_is_known_by_what_its_files_hold_not_by_their_names(target, prompts, tmp_path):
    a_run(target, prompts, tmp_path / "out")
    renamed = Path(shutil.copytree(target, tmp_path / "another name"))
    moved = Path(shutil.copy(prompts, tmp_path / "moved.txt"))
    a_run(renamed, moved, tmp_path / "out")
    moved.write_text(moved.read_text() + "one more\n")
    with pytest.raises(ConfigError, match=r"other settings \(data prompts\.txt \(\w{8}\), now moved\.txt \(\w{8}\)\)"):
        a_run(renamed, moved, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"other settings \(target tiny \(\w{8}\), now other \(\w{8}\)\)"):
        a_run(build_tiny_llama(tmp_path / "other", noise_of=target, noise=0.1), prompts, tmp_path / "out")
