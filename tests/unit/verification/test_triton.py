"""Compares the Triton kernels with the torch ones, on the CPU, in Triton's interpreter."""

import importlib
import importlib.util

import pytest

from tests.support.devices import interpreted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(300)
def test_triton_gives_the_same_as_torch():
    print(interpreted.run("tests.unit.verification.triton_comparison"))
