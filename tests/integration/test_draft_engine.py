"""The draft model's engine under the drafter's policy: real weights, real KV blocks, real draws.

What is drafted ahead, on the main chain and on side branches, with a cut vocabulary, must be what drafting
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


@pytest.fixture(scope="module")
def report(models):
    return rounds(models.drafter)


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
