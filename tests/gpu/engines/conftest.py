"""Which of these tests can run here, and the deployments that they add to those of the other suites.

Deployments are those of support/cluster/serving.py: a GPU for each rank of a target and of a draft model, none for a
look-up.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from outrider.cluster.installed import installed_version

# Triton multiplies float32 in TF32 unless told otherwise, and these tests compare float32 tokens with the CPU's. Ray's
# workers inherit it: it is set before Ray starts.
os.environ["TRITON_F32_DEFAULT"] = "ieee"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(number): needs so many GPUs, and vLLM's GPU build")


def missing(number):
    """Return what keeps a test for so many GPUs from running here; None: nothing."""
    if not (installed_version("vllm") and find_spec("vllm")):
        return "vLLM's GPU build is not installed"
    if not find_spec("ray"):
        return "Ray is not installed"
    if (found := torch.cuda.device_count()) < number:
        return f"needs {number} GPU{'s' if number > 1 else ''}, {found} visible"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if (mark := item.get_closest_marker("gpus")) is not None and (reason := missing(*mark.args)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def added(deployments):
    """Return a deployment by its name, sections given."""

    def use(name, **sections):
        deployments.add(name, sections)
        return deployments.use(name)

    return use
