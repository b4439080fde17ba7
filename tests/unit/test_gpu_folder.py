"""What runs on a machine with a GPU and little else runs without vLLM, without Ray and without an installation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path[:] = [place for place in sys.path if "__editable__" not in place]
sys.modules.update(vllm=None, ray=None)
import pytest
sys.exit(pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.exhaustive
def test_the_gpu_tests_run_in_a_bare_checkout(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", BARE, "-c", str(tmp_path / "pytest.ini"), "--confcutdir", "tests/gpu"]
    done = subprocess.run(
        [*command, "--rootdir", ".", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
