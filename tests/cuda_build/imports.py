"""Imports the CUDA environment under a stub of the driver, and checks that our seams fit its vLLM."""

from __future__ import annotations

from importlib.metadata import version

import torch

assert torch.version.cuda is not None, f"torch {torch.__version__} is no CUDA build"

import flashinfer  # noqa: F401 - vLLM imports it to choose an attention backend, whichever that is

from tests.cuda_build import h100  # noqa: F401 - before vLLM

import vllm._C_stable_libtorch
import vllm.vllm_flash_attn  # noqa: F401
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

import outrider.actors.serving.replica
import outrider.actors.vllm_adapter.target_engine  # noqa: F401
from outrider.actors.vllm_adapter.draft_worker import DraftWorker
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.actors.vllm_adapter.target_worker import TargetWorker

PACKAGES = (
    "torch", "triton", "vllm", "flashinfer-python", "cuda-python", "cuda-bindings", "nvidia-cutlass-dsl", "ray",
)  # fmt: skip


def main() -> None:
    for package in PACKAGES:
        print(f"{package} {version(package)}")
    assert issubclass(TargetWorker, Worker)
    assert issubclass(DraftWorker, Worker)
    for name in ("execute_model", "sample_tokens", "_sample", "_dummy_sampler_run"):
        assert hasattr(GPUModelRunner, name), f"vLLM's runner has no {name}"
        assert name in vars(RoundRunner), f"ours has no {name}"


if __name__ == "__main__":
    main()
