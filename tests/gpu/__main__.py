"""``python -m tests.gpu [pytest's arguments]``: what a machine with one GPU shows without vLLM, Ray or an installation.

It needs PyTorch, Triton, NumPy and pytest, and is run in a checkout's root. First the tests of this folder and those of
the other suites that import no more than that, by the list below; then, on a GPU and without arguments, verification's
times. ``engines`` beneath this folder is for an installed environment: `make test-gpu` runs both.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HERE = "tests/gpu"

SHARED = (
    "tests/unit/test_frame.py",
    "tests/unit/test_vocabulary.py",
    "tests/unit/test_round_origins.py",
    "tests/unit/messages",
    "tests/unit/link",
    "tests/integration/test_link_processes.py",
    "tests/integration/test_link_rendezvous.py",
    "tests/unit/length",
    "tests/unit/verification",
    "tests/unit/drafter/test_draft_draw.py",
    "tests/unit/drafter/test_draft_draw_cut.py",
    "tests/unit/drafter/test_draft_draw_golden.py",
    "tests/unit/drafter/test_draft_loop.py",
    "tests/unit/drafter/test_draft_model.py",
    "tests/unit/drafter/test_draft_vocabulary.py",
    "tests/unit/drafter/test_judge.py",
    "tests/unit/drafter/test_link_shares.py",
    "tests/unit/drafter/test_ngram.py",
    "tests/unit/drafter/test_pause.py",
    "tests/unit/drafter/test_reading.py",
    "tests/unit/drafter/test_several.py",
    "tests/unit/drafter/test_suffix_index.py",
    "tests/unit/drafter/test_worth.py",
    "tests/unit/learning/test_loss.py",
    "tests/unit/learning/test_replay.py",
    "tests/unit/learning/test_rounds.py",
)
"""Of the other suites: wire, messages, draft loop, cut head, draft lengths, verification."""

CONFIGURED = ("tests/unit/round",)
"""Needs what reads configurations as well."""

READS_CONFIGURATIONS = ("pydantic", "yaml", "jsonschema")


def main() -> int:
    """pytest's exit status, or that of the measurement."""
    configured = CONFIGURED if all(find_spec(name) for name in READS_CONFIGURATIONS) else ()
    options = ["-c", os.devnull, "--confcutdir", HERE, "--rootdir", str(ROOT), "--import-mode=importlib"]
    options += ["--ignore", f"{HERE}/engines", "-m", "not exhaustive", "-ra", "-p", "no:cacheprovider"]
    options += ["-p", "tests.threads"]  # from a conftest that is not read here
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
    os.chdir(ROOT)
    status = pytest.main([*options, HERE, *SHARED, *configured, *sys.argv[1:]])
    if status or len(sys.argv) > 1 or not torch.cuda.is_available():
        return int(status)
    measure = [sys.executable, "-m", "tests.bench.verification_speed", "--device", "cuda", "--ours-only"]
    return subprocess.run(measure, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
