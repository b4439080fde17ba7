"""A drafter that learns while it serves, from next to nothing: acceptance rises, and no token changes."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from outrider.deploy.client.sync_client import OutriderError
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import (
    HANG_GUARD_S,
    Deployment,
    Deployments,
    drafted,
    engine,
    living_actors,
    wait_until,
)
from tests.support.models.tiny_models import build_first_layer, build_learnable

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

COLOURS = ["red", "green", "blue", "black", "white", "grey", "pink", "gold"]
ANIMALS = ["cat", "dog", "cow", "hen", "fox", "owl", "bee", "ant", "elk", "emu"]
PROMPTS = [list(f"{colour} and {animal}\n".encode()) for colour in COLOURS for animal in ANIMALS]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("versions")


@pytest.fixture
def learning(deployments: Deployments, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    base = tmp_path_factory.getbasetemp()
    target = build_learnable(base / "learnable")
    drafter = build_first_layer(base / "first-layer", of=target)
    deployments.add(
        "learning",
        {
            "target": engine(target),
            "drafter": {
                "method": "draft_model",
                **engine(drafter),
                "learn": {
                    "learning_rate": 5e-3,
                    "held_out": 0.25,
                    "directory": str(kept),
                },
            },
            "speculation": {"num_speculative_tokens": 3, "adaptive": False},
            "link": {"link_deadline_ms": 10_000},
        },
    )
    return deployments.use("learning")


def answers(learning: Deployment, **options: Any) -> list[pb.GenerateResponse]:
    """Return answers to all prompts, each checked to be as the target alone would have answered."""

    def ask(prompt: list[int]) -> pb.GenerateResponse:
        return learning.client.generate(prompt, temperature=0.0, max_tokens=48, ignore_eos=True, **options)

    with ThreadPoolExecutor(4) as clients:
        given = list(clients.map(ask, PROMPTS))
    for prompt, answer in zip(PROMPTS, given, strict=True):
        learning.reference.check(prompt, answer.token_ids, label="while it learns")
    return given


def seeded(learning: Deployment) -> list[list[int]]:
    """Answers drawn with a seed: whoever drafts, they are the same."""
    options = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32, "ignore_eos": True}
    return [list(learning.client.generate(prompt, seed=7, **options).token_ids) for prompt in PROMPTS[:6]]


def acceptance(given: list[pb.GenerateResponse]) -> float:
    counts = [answer.metrics.speculative_decoding for answer in given]
    return sum(c.num_accepted_draft_tokens for c in counts) / sum(c.num_draft_tokens for c in counts)


def status(learning: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = learning.drafter_status()["learning"]
    return found


def test_acceptance_rises_while_it_serves_and_a_dead_trainer_costs_nothing(
    learning: Deployment, kept: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    drafted(lambda: learning.client.generate(PROMPTS[0], temperature=0.0, max_tokens=48, ignore_eos=True))
    before = acceptance(answers(learning))
    drawn = seeded(learning)

    def adopted() -> bool:
        answers(learning)
        return bool(status(learning)["changes"] >= 2)

    wait_until(adopted, HANG_GUARD_S, "two versions adopted")
    after = acceptance(answers(learning))
    assert seeded(learning) == drawn, "another drafter, the same tokens"
    assert after > before + 0.15, status(learning)
    figures = status(learning)["trainer"]
    assert figures["adopted"] >= 2
    assert figures["versions"][-1]["verdict"]["recent"]["mean"] > 0

    # What serves is kept as the weights of a checkpoint like any other.
    versions = sorted(kept.glob("*/version-*.safetensors"))
    assert versions
    checkpoint = shutil.copytree(tmp_path_factory.getbasetemp() / "first-layer", kept / "checkpoint")
    shutil.copyfile(versions[-1], checkpoint / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.num_hidden_layers == 1

    (pid,) = [pid for name, pid in living_actors() if name.startswith("Trainer:")]
    os.kill(pid, signal.SIGKILL)
    given = answers(learning)
    assert acceptance(given) > before + 0.15, "the drafter keeps what it has"

    def back() -> bool:
        now = status(learning)
        return bool(now["failures"] and now["trainer"]["learner"] != figures["learner"])

    wait_until(back, HANG_GUARD_S, "another trainer", every_s=0.5)
    assert status(learning)["version"] >= 1, "it goes on from the last version that was kept"
    assert acceptance(answers(learning)) > before + 0.15

    serving = learning.client.revert_drafter(0)
    wait_until(lambda: status(learning)["version"] >= serving, HANG_GUARD_S, "the way back", every_s=0.5)
    versions = {version.number: version for version in learning.client.status().learning.versions}
    assert versions[serving].HasField("again")
    assert versions[serving].again == 0
    assert versions[serving - 1].state == pb.DRAFTER_VERSION_STATE_REVERTED
    with pytest.raises(OutriderError, match="version: 999 is not kept; send one of 0"):
        learning.client.revert_drafter(999)
