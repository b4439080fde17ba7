"""What runs on a machine with a GPU and little else runs without vLLM, without Ray and without an installation; what
needs engines is collected everywhere, and skipped by name where it cannot run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BARE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path[:] = [place for place in sys.path if "__editable__" not in place]
missing = {missing}


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in missing else found(name, *rest)
"""
"""As sitecustomize: of every process, also those that tests start."""


ENGINES = ("vllm", "ray")
ALL = (*ENGINES, "pydantic", "yaml", "jsonschema", "grpc", "psutil", "prometheus_client", "transformers")


def bare(tmp_path, missing):
    """An environment for a process where nothing of ours is installed, nor what is missing."""
    (tmp_path / "sitecustomize.py").write_text(BARE.replace("{missing}", repr(missing)))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def run(arguments, environment, timeout=300, cwd=ROOT):
    """cwd: where a report is written."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_everything_listed_has_its_imports_and_fixtures_in_a_bare_checkout(tmp_path):
    done = run(["tests.gpu", "--setup-plan", "-q"], bare(tmp_path, ALL), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    for module in ("gpu/test_nccl", "test_link_processes", "test_draft_loop", "test_draft_vocabulary", "length"):
        assert f"{module}" in done.stdout
    assert "gpu/engines" not in done.stdout
    assert "not run: vLLM's GPU build is not installed" in done.stdout
    assert "unit/round/" not in done.stdout, "it needs pydantic"


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_the_gpu_tests_run_in_a_bare_checkout(tmp_path):
    """With what trains and what reads configurations."""
    done = run(["tests.gpu", "-q"], bare(tmp_path, ENGINES), timeout=2300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    for part in ("kernels", "links"):
        assert re.search(rf"^{part} +[1-9]\d* +0 +\d+ +\d+  ok$", done.stdout, re.MULTILINE), done.stdout[-2000:]
    assert "tests/gpu/test_training" not in done.stdout, "it was skipped"


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run here")
def test_tests_of_engines_are_collected_and_skipped_by_name_without_gpus():
    done = run(["pytest", "tests/gpu/engines", "-v", "-p", "no:cacheprovider"], dict(os.environ))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" not in done.stdout
    for name in ("equality", "distribution", "drafters", "graphs", "faults", "step_times"):
        assert f"tests/gpu/engines/test_gpu_{name}.py" in done.stdout
    assert "vLLM's GPU build is not installed" in done.stdout
