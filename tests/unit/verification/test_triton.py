"""The Triton kernels in Triton's interpreter, on the CPU, against the torch ones."""

import importlib
import importlib.util

import pytest
import torch

from outrider.actors.verification import torch_kernel
from tests.support.devices import interpreted
from tests.support.devices.counting_device import DEVICE, CountingDevice


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(300)
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


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("module", "kernel", "number"),
    [
        ("triton_kernel", "find_nucleus", "rows"),
        ("triton_kernel", "decide", "K"),
        ("triton_draws", "draw_from_q", "alternatives"),
    ],
)
def test_what_differs_from_step_to_step_compiles_no_kernel_anew(module, kernel, number):
    """By Triton's own key of what it has compiled, for an sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    jitted = getattr(importlib.import_module(f"outrider.actors.verification.{module}"), kernel)
    key_of = create_function_from_signature(jitted.signature, jitted.params, make_backend(GPUTarget("cuda", 90, 32)))
    others = {"vocab_size": 128256, "n": 64, "rows": 4, "tiles": 126, "K": 4, "alternatives": 2}
    keys = set()
    for value in (1, 5, 16):
        given = [
            1 if param.is_constexpr else {**others, number: value}.get(param.name, torch.zeros(8))
            for param in jitted.params
        ]
        keys.add(str(key_of(*given)[1]))
    assert len(keys) == 1
