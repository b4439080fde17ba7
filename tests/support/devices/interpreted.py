"""Triton kernels without a GPU: a module runs by itself in a process of its own, where Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(module: str) -> str:
    """What it prints. The interpreter must be chosen before Triton is imported, and other tests import it without.
    Raises AssertionError with all of its output when it fails."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).lstrip(os.pathsep)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
