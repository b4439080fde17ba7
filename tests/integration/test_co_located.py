"""Co-located drafting: every method of vLLM's that its CPU build has, with tiny random heads, gives the greedy tokens
of the target alone."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster.serving import engine
from tests.support.models import tiny_heads
from tests.support.models.reference import Reference

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40
K = 3
PROMPTS = [b"Hello world, this is", b"a", b"one two one two one two one two one two"]

PROCESSES = 2
"""At once, of one thread each. Two engines of this size take some 2 GiB."""

ACCEPTS = ("draft_model", "ngram")
"""Methods whose drafts are good here: the others' heads are random."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    names = ("eagle", "eagle3", "medusa", "dflash", "mtp_target")
    return {name: getattr(tiny_heads, f"build_{name}")(root / name) for name in names}


@pytest.fixture(scope="module")
def results(models, heads, request):
    """Name -> what came out. An engine for each that a test of this run asks for."""

    def job(name, drafter, target=models.target):
        config = {
            "target": engine(target, engine_args={"enable_prefix_caching": False}),
            "drafter": {"placement": "co_located", "num_speculative_tokens": K, **drafter},
        }
        return {"name": name, "config": config, "prompts": [list(prompt) for prompt in PROMPTS]}

    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    jobs = [
        job("draft_model", {"method": "draft_model", "model": str(models.drafter)}),
        job("eagle", {"method": "eagle", "model": str(heads["eagle"])}),
        job("eagle3", {"method": "eagle3", "model": str(heads["eagle3"])}),
        job("medusa", {"method": "medusa", "model": str(heads["medusa"])}),
        job("dflash", {"method": "dflash", "model": str(heads["dflash"])}),
        job("mtp", {"method": "mtp"}, target=heads["mtp_target"]),
        job("unpadded", {"method": "eagle", "model": str(heads["eagle"]), "disable_padded_drafter_batch": True}),
        # Last: it loads numba, after which making another engine in the same process fails (inspecting its modules).
        job("ngram", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}),
    ]
    jobs = [each for each in jobs if each["name"] in asked]
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


@pytest.mark.parametrize("name", ["eagle3", "medusa", "dflash", "mtp", "unpadded", "draft_model", "ngram", "eagle"])
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
