"""A driver for Triton on a machine without a GPU: it names the architecture to compile for, and can launch nothing."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends import backends
from triton.backends.compiler import GPUTarget


class TritonDriver:
    def __init__(self, capability: int = 90) -> None:
        """capability: 90 for sm_90."""
        self._target = GPUTarget("cuda", capability, 32)
        for name, backend in backends.items():
            backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")  # type: ignore[method-assign, misc]

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
