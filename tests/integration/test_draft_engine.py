"""The draft model's engine under the drafter's policy: real weights, real KV blocks, real draws.

What is drafted ahead, on the main line and on side branches, with a cut vocabulary, must be what drafting
at the last moment gives. The verifier is played by tests/draft_engine_rounds.py, which forces hits, misses and stale
drafts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["drafter", "one_pass"])
def report(models, request):
    return rounds(getattr(models, request.param))


def rounds(drafter, **section):
    """Return what was drafted, by sampling. section: what the engine's has besides."""
    return script("tests/draft_engine_rounds.py", drafter, json.dumps(section))


def script(path, *arguments):
    command = [sys.executable, path, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("cut", ["", ", cut"])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_what_is_drafted_ahead_is_what_would_be_drafted_at_once(report, mode, cut):
    seen = report[mode + cut]
    assert seen["differ"] == []
    assert seen["agree"] == 120
    # Every way of answering was taken.
    assert min(seen["origins"][origin] for origin in ("MAIN_LINE", "SIDE_BRANCH", "MISS")) >= 4


def test_closed_sequences_leave_no_block_behind(report):
    for seen in report.values():
        assert set(seen["usage"].values()) == {0}


def test_in_one_pass_each_proposal_is_one_forward_pass_of_transformers_over_text_and_masks(models):
    """Ids, or q where drafts are rejected against it; after hits and misses, and after the prefix cache."""
    seen = script("tests/support/models/one_pass_texts.py", models.one_pass)
    assert seen.pop("one_pass")
    assert seen.pop("mask_is_likeliest") > 0, "it was never to be kept from being proposed"
    for mode, of_mode in seen.items():
        assert of_mode["differ"] == [], mode
        assert min(of_mode["origins"][origin] for origin in ("MAIN_LINE", "SIDE_BRANCH", "MISS")) >= 4, mode
        assert of_mode["cached"] >= 96, mode
        assert of_mode["blocks"] == 0, mode
