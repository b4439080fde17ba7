"""`outrider acceptance` of a drafter whose output head is cut when it is served: what is served is measured."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from outrider.actors.drafter.vocabulary import VOCABULARY_FILE, DraftVocabulary
from outrider.cluster.config import CoLocatedConfig, DraftModelConfig
from outrider.deploy.cli.acceptance import _cut_to
from outrider.deploy.distill.measure import CutHead, Settings, measure, table
from outrider.deploy.distill.prompts import read_prompts
from outrider.deploy.progress import Progress
from tests.tiny_models import build_tiny_llama


def test_a_token_can_be_drafted_from_when_the_text_has_held_it():
    head = CutHead(DraftVocabulary(10, 4, always=[9], at_first=[0, 1]))
    logits = torch.zeros(4, 10)
    head.cut(logits, 1, [2], [5, 6, 5, 0, 7])
    allowed = [set((row > -math.inf).nonzero().flatten().tolist()) for row in logits]
    assert all(9 in each and 2 in each and len(each) == 4 for each in allowed), "end tokens, and what the prompt holds"
    assert [5 in allowed[0], 6 in allowed[0], 6 in allowed[1]] == [True, False, True]
    assert head.document() == {"size": 4, "tokens": 5, "missed": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    target = build_tiny_llama(home / "target")
    drafter = Path(shutil.copytree(target, home / "drafter"))
    (drafter / VOCABULARY_FILE).write_text(json.dumps(list(range(8))))
    return target, drafter


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("size", [None, 0, 16])
def test_what_is_served_is_measured(models, tmp_path, size, temperature):
    """The drafter is the target itself: all that its head lets it say is accepted, greedily and by coupled noise."""
    target, drafter = models
    data = tmp_path / "prompts.txt"
    data.write_text("one\nanother\nand one more\n")
    settings = Settings(
        target, drafter, read_prompts(data), None, False, temperature, 3, 24, 0, None, "cpu", torch.float32,
        draft_vocab_size=size,
    )  # fmt: skip
    report = measure(settings, Progress())
    cut = report["draft_vocabulary"]
    rates = {mode: found["per_token_acceptance"] for mode, found in report["modes"].items()}
    exact = [rates[mode] for mode in ("greedy", "coupled") if mode in rates]
    assert all(math.isfinite(rate) for rate in rates.values())
    if size == 16:
        assert cut["size"] == 16
        assert cut["missed"] > 0
        assert max(exact) < 1.0
        assert f"cut to 16 tokens, as when served; {cut['missed']} of {cut['tokens']}" in table(report)
    else:  # as many as it was trained on, but no fewer than 2,048: all that the tiny one has
        assert (cut is None) == (size == 0)
        assert exact == [pytest.approx(1.0)] * len(exact)


def test_a_preset_s_drafter_is_cut_as_it_says():
    for fields, size in (
        ({}, None),
        ({"draft_vocab_size": 4096}, 4096),
        ({"draft_vocab_size": 0}, 0),
        ({"tensor_parallel_size": 2}, 0),
    ):
        assert _cut_to(DraftModelConfig(method="draft_model", model="d", **fields)) == size
    assert _cut_to(CoLocatedConfig(placement="co_located", method="draft_model", model="d")) == 0
