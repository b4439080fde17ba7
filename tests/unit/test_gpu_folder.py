"""What runs on a machine with a GPU and little else runs without vLLM, without Ray and without an installation; what
needs engines is collected everywhere, and skipped by name where it cannot run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as gpu
from tests.gpu import parts

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


def test_the_bare_environment_is_bare(tmp_path):
    for name in ("vllm", "ray", "pydantic", "outrider"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            cwd="/",
            env=bare(tmp_path, ALL),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "ModuleNotFoundError" in done.stderr


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


def test_each_part_runs_whatever_the_former_came_to_and_the_report_tells(tmp_path, monkeypatch, capsys):
    """A test fails in the first part, the second dies of a signal as of a crash in CUDA, the third passes."""
    sources = {
        "gpu/test_kernel.py": """
import pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "tokens differ"
def test_lacks(): pytest.skip("no GPU is visible")
""",
        "links/test_link.py": """
import os, signal
def test_first(): pass
def test_crash(): os.kill(os.getpid(), signal.SIGKILL)
""",
        "gpu/engines/test_engine.py": """
def test_measures(capsys):
    with capsys.disabled():
        print("\\nmeasured: batch 1 | 2.500")
""",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    for name, value in {
        "HERE": f"{tmp_path}/gpu",
        "LINKS": (f"{tmp_path}/links",),
        "SHARED": (),
        "CONFIGURED": (),
    }.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "why_no_engines", lambda: "")
    monkeypatch.chdir(tmp_path)
    assert gpu.main(["-q"]) == 1
    printed, report = capsys.readouterr().out, (tmp_path / gpu.REPORT).read_text()
    for row in (
        r"kernels +1 +1 +1 +\d+  FAILED",
        r"links +1 +0 +0 +\d+  FAILED: ended by SIGKILL in .*test_link.py::test_crash",
        r"engines +1 +0 +0 +\d+  ok",
        r"  .*test_kernel.py::test_wrong: AssertionError: tokens differ",
        r"  1 x no GPU is visible",
        r"  batch 1 \| 2.500",
    ):
        assert re.search(f"^{row}$", printed, re.MULTILINE), (row, printed)
        assert re.search(f"^{row}$", report, re.MULTILINE), (row, report)
    assert printed.endswith(f"send back: {tmp_path / gpu.REPORT}\n")
    assert "def test_wrong" in report, "with the traceback"


def test_a_part_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "test_hang.py").write_text("import time\ndef test_first(): pass\ndef test_hang(): time.sleep(3600)\n")
    monkeypatch.setattr(parts, "GRACE_S", 5.0)
    part = parts.run_tests("links", ["-c", os.devnull, str(tmp_path)], limit_s=10.0)
    assert part.problem.startswith("ended after 10 s"), part


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run here")
def test_tests_of_engines_are_collected_and_skipped_by_name_without_gpus():
    done = run(["pytest", "tests/gpu/engines", "-v", "-p", "no:cacheprovider"], dict(os.environ))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" not in done.stdout
    for name in ("equality", "distribution", "drafters", "graphs", "faults", "step_times"):
        assert f"tests/gpu/engines/test_gpu_{name}.py" in done.stdout
    assert "vLLM's GPU build is not installed" in done.stdout
