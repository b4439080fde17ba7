"""Co-located drafting: every method of vLLM's that its CPU build has, with tiny random heads, gives the greedy tokens
of the target alone."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from outrider.deploy.distill.measure import measure
from outrider.deploy.distill.prompts import read_prompts
from tests.support.cluster.serving import engine
from tests.support.models import tiny_heads
from tests.support.models.reference import Reference
from tests.support.models.tiny_distilled import build_distilled
from tests.support.models.tiny_models import build_learnable

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40
LONGER = 96
"""Tokens of answers that acceptance is measured on, so that what their end cuts off is little of them."""

K = 3
PROMPTS = [b"Hello world, this is", b"a", b"one two one two one two one two one two"]

PROCESSES = 2
"""At once, of one thread each. Two engines of this size take some 2 GiB."""

OTHER_POSITIONS = {"rope_theta": 100.0, "rope_type": "default"}

REFUSED = ("suffix", "mlp_speculator")

ACCEPTS = ("draft_model", "ngram")
"""Methods whose drafts are good here: the others' heads are random."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    names = ("eagle", "eagle3", "medusa", "dflash", "mtp_target", "mlp_speculator")
    return {name: getattr(tiny_heads, f"build_{name}")(root / name) for name in names}


@dataclass(frozen=True)
class Distilled:
    target: Path
    drafter: Path
    data: Path


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A target, the drafter that was trained for it, stored and assembled, and what both are asked."""
    root = tmp_path_factory.mktemp("distilled")
    target = build_learnable(root / "learnable")
    drafter, data = build_distilled(root / "run", target)
    asked = root / "asked.jsonl"
    asked.write_text("".join(data.read_text().splitlines(keepends=True)[::10]))
    return Distilled(target, drafter, asked)


@pytest.fixture(scope="module")
def results(models, heads, request):
    """Name -> what came out. An engine for each that a test of this run asks for, and for those that are refused."""

    def job(name, drafter, target=models.target, engine_args=None, **more):
        config = {
            "target": engine(target, engine_args={"enable_prefix_caching": False, **(engine_args or {})}),
            "drafter": {"placement": "co_located", "num_speculative_tokens": K, **drafter},
        }
        return {"name": name, "config": config, "prompts": [list(prompt) for prompt in PROMPTS], **more}

    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    jobs = [
        job("draft_model", {"method": "draft_model", "model": str(models.drafter)}),
        job("eagle", {"method": "eagle", "model": str(heads["eagle"])}),
        job("eagle3", {"method": "eagle3", "model": str(heads["eagle3"])}),
        job("medusa", {"method": "medusa", "model": str(heads["medusa"])}),
        job("dflash", {"method": "dflash", "model": str(heads["dflash"])}),
        job("mtp", {"method": "mtp"}, target=heads["mtp_target"]),
        job("unpadded", {"method": "eagle", "model": str(heads["eagle"]), "disable_padded_drafter_batch": True}),
        job(
            "other positions",
            {"method": "draft_model", "model": str(models.drafter)},
            engine_args={"hf_overrides": {"rope_parameters": OTHER_POSITIONS}},
        ),
        job("suffix", {"method": "suffix"}),
        job(
            "mlp_speculator",
            {"method": "medusa", "model": str(heads["mlp_speculator"])},
            as_method="mlp_speculator",
        ),
        # Last: it loads numba, after which making another engine in the same process fails (inspecting its modules).
        job("ngram", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}),
    ]
    if "distilled" in asked:
        one = request.getfixturevalue("distilled")
        prompts = [list(prompt.text.encode()) for prompt in read_prompts(one.data).prompts]
        drafter = {"method": "draft_model", "model": str(one.drafter)}
        jobs.insert(0, job("distilled", drafter, one.target, prompts=prompts, max_tokens=LONGER))
    jobs = [each for each in jobs if each["name"] in {*asked, *REFUSED}]
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = pool.map(run, [jobs[first::PROCESSES] for first in range(PROCESSES)])
        lines = [line for part in parts for line in part]
    return {line.pop("name"): line for line in lines}


def run(jobs, num_tokens=NUM_TOKENS):
    """One process, one engine after the other."""
    command = [sys.executable, "tests/support/models/co_located_engines.py", json.dumps(jobs), str(num_tokens)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(jobs), done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("name", ["other positions"])
def test_a_checkpoint_with_overrides_is_another_model(results, models, tmp_path, name):
    """``target.engine_args.hf_overrides``: the tokens are those of a checkpoint that says so itself."""
    assert "error" not in results[name], results[name]
    changed = shutil.copytree(models.target, tmp_path / "changed")
    document = json.loads((changed / "config.json").read_text())
    document["rope_parameters"] = OTHER_POSITIONS
    (changed / "config.json").write_text(json.dumps(document))
    reference, original = Reference(changed), Reference(models.target)
    for prompt, answer in zip(PROMPTS, results[name]["tokens"], strict=True):
        reference.check(prompt, answer, label=name)
    assert any(
        original.greedy(prompt, NUM_TOKENS) != answer
        for prompt, answer in zip(PROMPTS, results[name]["tokens"], strict=True)
    )


# draft_model is served in test_co_located_serving.py, eagle is unpadded's method, ngram has no heads of its own.
SWEPT = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("draft_model", "ngram", "eagle")]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "dflash", "mtp", "unpadded", *SWEPT])
def test_greedy_tokens_are_those_of_the_target_alone(results, models, heads, name):
    result = results[name]
    assert "error" not in result, result
    reference = Reference(heads["mtp_target"] if name == "mtp" else models.target)
    for prompt, answer in zip(PROMPTS, result["tokens"], strict=True):
        assert len(answer) == NUM_TOKENS
        reference.check(prompt, answer, label=name)
    assert len(reference.ties) <= 1
    assert result["drafted"] > 0
    assert 0 <= result["accepted"] <= result["drafted"]
    if name in ACCEPTS:
        assert result["accepted"] > 0


@pytest.mark.parametrize("name", ["distilled"])
def test_a_distilled_drafter_is_worth_in_stock_vllm_what_was_measured(results, distilled, name):
    """Nothing of ours is in the engine but the checkpoint that `outrider distill` stored and assembled."""
    result = results[name]
    assert "error" not in result, result
    reference = Reference(distilled.target)
    data = read_prompts(distilled.data)
    for prompt, answer in zip(data.prompts, result["tokens"], strict=True):
        assert len(answer) == LONGER
        reference.check(prompt.text.encode(), answer, label=name)
    report = measure(
        target=distilled.target, drafter=distilled.drafter, data=data, limit=None, chat=False,
        k=K, max_tokens=LONGER, device="cpu", dtype=torch.float32,
    )  # fmt: skip
    measured = report["acceptance_rate"]
    assert measured > 0.2, "it has learned something"
    assert abs(result["accepted"] / result["drafted"] - measured) <= 0.02, measured


@pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="arctic-inference is installed")
def test_suffix_needs_a_package_that_is_not_here_and_says_so(results):
    assert "arctic-inference" in results["suffix"]["error"]


def test_mlp_speculator_is_still_without_a_drafter_in_vllm(results):
    """The reason that our refusal gives. When this fails, vLLM has routed it, and the refusal has to go."""
    error = results["mlp_speculator"]["error"]
    assert "Model architectures ['MLPSpeculatorPreTrainedModel'] are not supported" in error
