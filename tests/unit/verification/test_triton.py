"""The Triton kernels in Triton's interpreter, on the CPU, against the torch ones."""

import importlib.util

import pytest

from outrider.actors.verification import torch_kernel
from tests import interpreted
from tests.counting_device import DEVICE, CountingDevice


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_gives_the_same_as_torch():
    print(interpreted.run("tests.unit.verification.triton_comparison"))


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
