"""The real CUDA build of vLLM on a machine without a GPU: import this before vLLM. See `virtual_gpu.py`."""

from __future__ import annotations

import os

from outrider.actors.drafter.actor import ENGINE_ENVIRONMENT

os.environ.update(
    ENGINE_ENVIRONMENT,
    TORCHDYNAMO_DISABLE="1",  # nothing is compiled but Triton kernels
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import torch
import torch._dynamo  # reads PyTorch's functions as it is imported, and refuses replaced ones
from triton.runtime import driver

from tests.cuda_build import virtual_gpu
from tests.cuda_build.triton_driver import TritonDriver


driver.set_active(TritonDriver())
virtual_gpu.install()

import vllm.platforms
from vllm.platforms import cuda as cuda_platform
from vllm.platforms.interface import DeviceCapability


class VirtualH100(cuda_platform.CudaPlatformBase):
    """vLLM's CUDA platform, with an H100's answers where it asks NVML. Ranks speak over Gloo."""

    dist_backend = "gloo"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*virtual_gpu.CAPABILITY)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.cuda.get_device_properties(0).name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return "GPU-0"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return virtual_gpu.MEMORY_BYTES

    @classmethod
    def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
        return True

    @classmethod
    def get_device_numa_node(cls, device_id: int = 0) -> int:
        return 0

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def set_device(cls, device: torch.device) -> None: ...


vllm.platforms._current_platform = VirtualH100()

from tests.cuda_build import kernels, triton_launch

for replaced in (triton_launch, kernels):
    replaced.install()


def _load_on_host() -> None:
    """Models are loaded on the CPU and moved, since vLLM's parameters are subclasses of PyTorch's."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    load_model = GPUModelRunner.load_model

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        self.vllm_config.load_config.device = "cpu"
        load_model(self, *args, **kwargs)
        virtual_gpu.to_gpu(self.model)

    GPUModelRunner.load_model = load


_load_on_host()
