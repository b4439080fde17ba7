"""Compares the Triton kernels with the torch ones, on the CPU, in Triton's interpreter."""

import importlib
import importlib.util

import pytest
import torch

from tests.support.devices import interpreted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(300)
def test_triton_gives_the_same_as_torch():
    print(interpreted.run("tests.unit.verification.triton_comparison"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("module", "kernel", "number"),
    [
        ("triton_top_p", "find_nucleus", "rows"),
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
