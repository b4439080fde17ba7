"""The Triton kernels in Triton's interpreter, on the CPU, against the torch ones."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors.verification import torch_kernel
from tests.counting_device import DEVICE, CountingDevice

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_gives_the_same_as_torch():
    # A process of its own: the interpreter must be chosen before Triton is imported, and other tests import it without.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.verification.triton_comparison"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_comparison_asks_torch_on_the_cpu_whatever_the_device(monkeypatch):
    """Its coupled choice is numpy's, which looks at no device's memory."""
    from tests.unit.verification import triton_comparison

    device, verify = CountingDevice(), torch_kernel.verify
    monkeypatch.setattr(triton_comparison, "compare_words", lambda device: 0)
    monkeypatch.setattr(triton_comparison, "compare_choices", lambda device: 0)
    monkeypatch.setattr(triton_comparison, "compare_draws", lambda device: 0)
    monkeypatch.setattr(triton_comparison, "compare_nucleus", lambda device: 0)
    monkeypatch.setattr(triton_comparison.triton_kernel, "verify", lambda batch: device.kernel(verify, batch))
    with device:
        assert triton_comparison.main(DEVICE) == 0
        with pytest.raises(TypeError, match="numpy"):
            verify(triton_comparison.random_batch(0, 300, True, False, False, DEVICE))
