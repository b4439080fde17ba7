"""Names the transports of a link. It imports nothing, so that neither links nor configurations import the other."""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "nccl", "hccl", "xccl"]

DEVICE_BACKENDS = {"nccl": "cuda", "hccl": "npu", "xccl": "xpu"}
"""Maps backends of torch.distributed that move device memory to torch's device type. ROCm's are nccl and cuda."""
