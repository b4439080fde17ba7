"""Which device the tests run on."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def gpu(device):
    if device.type != "cuda":
        pytest.skip("no GPU is visible")
    return device


def pytest_report_header():
    if not torch.cuda.is_available():
        return "no GPU is visible: what can, runs on the CPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}, torch {torch.__version__}"
